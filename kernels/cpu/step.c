/* A decode step in one call: store the token, attend. */
#include <stdlib.h>
#include "attention.h"

static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

typedef struct {
  int64_t rows, group, dim, dim_v, dtype, slots, start, end, at, holes, threads;
  float scale;
  const char *q, *k, *v;
  char *keys, *values;
  int32_t *position;
  char *out;
} Step;

/* One decoded token: its key, value and position go into slot `end` of every row, and its query attends to the slots
   from `start` on. q [row, group, dim], k [row, dim], v [row, dim_v] and out [row, group, dim_v] are contiguous; keys,
   values and position (NULL: nobody keeps them) have `slots` slots per row. Where `holes`, slots of position -1 are not
   seen. Returns 0, or 1 if memory for the buffers cannot be had. */
int kv_step(const Step *s) {
  const int64_t rows = s->rows, dim = s->dim, dim_v = s->dim_v, dtype = s->dtype, slots = s->slots, start = s->start;
  const int64_t end = s->end, holes = s->holes;
  int64_t threads = s->threads;
  const int64_t size = dtype == F32 ? 4 : 2, columns = end + 1 - start, heads = s->group, padded = (heads + 3) / 4 * 4;
  const int64_t wide = (dim + LANES - 1) / LANES * LANES, wide_v = (dim_v + LANES - 1) / LANES * LANES;
  const int direct = dtype == F32 && wide_v == dim_v;
  for (int64_t r = 0; r < rows; r++) {
    memcpy(s->keys + (r * slots + end) * dim * size, s->k + r * dim * size, dim * size);
    memcpy(s->values + (r * slots + end) * dim_v * size, s->v + r * dim_v * size, dim_v * size);
    if (s->position) s->position[r * slots + end] = (int32_t)s->at;
  }
  const int64_t most = rows * columns * (dim + dim_v) / 32768, pieces = columns / 512;
  if (threads > most) threads = most > 1 ? most : 1;
  int64_t splits = (4 * threads + rows - 1) / rows;
  if (splits > pieces) splits = pieces > 1 ? pieces : 1;
  float *scaled = calloc(rows * padded * wide + rows * heads * (wide_v + 1) + (holes ? rows * columns / 4 + 1 : 0), 4);
  if (!scaled) return 1;
  float *found = scaled + rows * padded * wide, *lse = found + rows * heads * wide_v;
  uint8_t *visible = (uint8_t *)(lse + rows * heads);
  kv_queries(s->q, dtype, rows, heads, heads * dim, dim, dim, padded, wide, 0, s->scale, scaled);
  for (int64_t r = 0; holes && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) visible[r * columns + c] = s->position[r * slots + start + c] >= 0;
  Attention a = {.rows = rows, .heads = heads, .padded = padded, .queries = 1, .dim = wide, .dim_v = wide_v,
                 .columns = columns, .splits = splits, .threads = threads, .q = scaled,
                 .out = direct ? (float *)s->out : found, .lse = lse};
  a.k = (Field){.layout = DENSE, .dim = dim, .dtype = dtype, .row_stride = slots * dim, .token_stride = dim,
                .data = s->keys + start * dim * size};
  a.v = (Field){.layout = DENSE, .dim = dim_v, .dtype = dtype, .row_stride = slots * dim_v, .token_stride = dim_v,
                .data = s->values + start * dim_v * size};
  if (holes) a.visible = visible, a.visible_row = columns, a.visible_column = 1;
  int failed = kv_attention(&a);
  for (int64_t i = 0; !direct && !failed && i < rows * heads; i++)
    for (int64_t d = 0; d < dim_v; d++) {
      float x = found[i * wide_v + d];
      if (dtype == F32) ((float *)s->out)[i * dim_v + d] = x;
      else ((uint16_t *)s->out)[i * dim_v + d] = to_bf16(x);
    }
  free(scaled);
  return failed;
}
