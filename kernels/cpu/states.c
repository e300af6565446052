/* Joining attention over two disjoint sets of tokens. */
#include <math.h>
#include <stdint.h>

/* out[row] and lse[row] of the union, from each set's; out [row, dim] may be one of the two given. A set whose lse is
   -inf adds nothing, whatever its out holds. */
void kv_merge(const float *out_a, const float *lse_a, const float *out_b, const float *lse_b, int64_t rows, int64_t dim,
              int64_t threads, float *out, float *lse) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const float *a = out_a + r * dim, *b = out_b + r * dim;
    float *to = out + r * dim;
    const float high = fmaxf(lse_a[r], lse_b[r]);
    if (lse_a[r] == -INFINITY && lse_b[r] == -INFINITY) { /* and not where one is no number */
      for (int64_t d = 0; d < dim; d++) to[d] = 0;
      lse[r] = high;
      continue;
    }
    const float from_a = expf(lse_a[r] - high), from_b = expf(lse_b[r] - high), total = from_a + from_b;
    const float share_a = from_a / total, share_b = from_b / total;
    if (share_a == 0)
      for (int64_t d = 0; d < dim; d++) to[d] = b[d] * share_b;
    else if (share_b == 0)
      for (int64_t d = 0; d < dim; d++) to[d] = a[d] * share_a;
    else
      for (int64_t d = 0; d < dim; d++) to[d] = a[d] * share_a + b[d] * share_b;
    lse[r] = high + logf(total);
  }
}
