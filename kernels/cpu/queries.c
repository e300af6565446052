/* Queries as the kernels take them: floats, scaled, in padded rows. */
#include "fields.h"

/* out [row, padded, dim]: q [row, head, wide] by strides, times `scale`; 0 behind `wide` and behind the heads. With
   `split`, out is [row, padded, 2, dim]: what is positive of q, then what is negative. */
void kv_queries(const char *q, int64_t dtype, int64_t rows, int64_t heads, int64_t row_stride, int64_t head_stride,
                int64_t wide, int64_t padded, int64_t dim, int64_t split, float scale, float *out) {
  const int64_t parts = split ? 2 : 1;
  memset(out, 0, sizeof(float) * rows * padded * parts * dim);
  for (int64_t i = 0; i < rows * heads; i++) {
    int64_t row = i / heads, head = i % heads;
    float *to = out + (row * padded + head) * parts * dim;
    widen_run(q, row * row_stride + head * head_stride, wide, dtype, to);
    for (int64_t d = 0; d < wide; d++) to[d] *= scale;
    if (!split) continue;
    for (int64_t d = 0; d < wide; d++) {
      to[dim + d] = to[d] < 0 ? to[d] : 0;
      to[d] = to[d] > 0 ? to[d] : 0;
    }
  }
}
