/* A decode step in one call: store the token, attend to the tail and, where there are some, to sealed pages. */
#include <stdlib.h>
#include "step.h"

void kv_merge(const float *out_a, const float *lse_a, const float *out_b, const float *lse_b, int64_t rows, int64_t dim,
              int64_t threads, float *out, float *lse);

/* Threads for reading so many values, as in call.py. */
INLINE int64_t team(int64_t threads, int64_t values) {
  const int64_t most = values / 32768;
  return threads < most ? threads : most > 1 ? most : 1;
}

/* Threads, and pieces of a row, as in call.py. */
static void share_work(Attention *a, int64_t threads) {
  const int64_t pieces = a->columns / 512;
  a->threads = team(threads, a->rows * a->columns * (a->k.dim + a->v.dim));
  const int64_t splits = (4 * a->threads + a->rows - 1) / a->rows;
  a->splits = splits < pieces ? splits : pieces > 1 ? pieces : 1;
}

/* The row's first slot without a token, from `start` on; `end` if there is none. */
static int64_t free_slot(const Step *s, int64_t row) {
  int64_t slot = s->start;
  while (slot < s->end && s->position[row * s->slots + slot] >= 0) slot++;
  return slot;
}

/* What stays. With `place`, of each row that has more than its `budget` one goes, by where it is; with `budget` alone, the
   `recent` newest and those before `first` stay, and the best others, by what the query paid to each, on top of its
   score if it `adds`; with a `threshold`, what goes may be merged. With `first` and `recent`, only these stay, of the
   tokens that are `sealed` too. */
static void verdict(const Step *s, int64_t columns, int64_t wide, const float *logits, float *paid, const float *lse,
                    int64_t threads) {
  if (s->budget && !s->place) payments(s, logits, lse, columns, wide, threads, paid);
#pragma omp parallel for schedule(static) num_threads(threads) if (s->threshold != NULL)
  for (int64_t r = 0; r < s->rows; r++) {
    if (s->place) judge_places(s, r, columns);
    else if (s->budget) {
      const int64_t lost = judge(s, r, columns, paid + r * wide);
      if (s->threshold && lost >= 0) merge_away(s, r, lost, columns);
    } else if (s->first) {
      judge_ends(s, r, columns);
      if (s->sealed) judge_sealed(s, r);
    }
  }
}

/* One decoded token: its key, value and position go into slot `end` of every row, or into one that is free if `fill`,
   and its query attends to the slots from `start` on. q [row, group, dim], k [row, dim], v [row, dim_v] and out [row,
   group, dim_v] are contiguous; keys, values and position (NULL: nobody keeps them) have `slots` slots per row. Where
   `holes`, slots of position -1 are not seen. Then `verdict`. Returns 0; 1 if memory for the buffers cannot be had; 2,
   with nothing done, if a row has no free slot. */
int kv_step(const Step *s) {
  const int64_t rows = s->rows, dim = s->dim, dim_v = s->dim_v, dtype = s->dtype, slots = s->slots, start = s->start;
  const int64_t end = s->end;
  int64_t holes = 0;
  const int64_t size = dtype == F32 ? 4 : 2, columns = end - start + !s->fill, heads = s->group;
  const int64_t padded = (heads + 3) / 4 * 4;
  const int64_t wide = (dim + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
  const int64_t wide_v = (dim_v + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
  const int direct = dtype == F32 && wide_v == dim_v, parts = s->far ? 2 : 1, judges = s->budget && !s->place;
  for (int64_t r = 0; s->fill && r < rows; r++)
    if (free_slot(s, r) == end) return 2;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t to = s->fill ? free_slot(s, r) : end;
    memcpy(s->keys + (r * slots + to) * dim * size, s->k + r * dim * size, dim * size);
    memcpy(s->values + (r * slots + to) * dim_v * size, s->v + r * dim_v * size, dim_v * size);
    if (s->position) s->position[r * slots + to] = (int32_t)s->at;
    if (s->score) s->score[r * slots + to] = 0;
  }
  for (int64_t r = 0; s->holes && r < rows; r++) { /* there may be none left */
    int32_t dead = 0;
    for (int64_t c = 0; c < columns; c++) dead |= s->position[r * slots + start + c];
    holes |= dead < 0;
  }
  const int64_t results = rows * heads * (wide_v + 1);
  float *scaled = calloc(rows * padded * wide + parts * results + (holes ? rows * columns / 4 + 1 : 0), 4);
  const int64_t across = (columns + LANES - 1) / LANES * LANES, logits = judges ? rows * heads * columns + LANES : 0;
  float *paid = judges ? malloc(sizeof(float) * (logits + rows * across)) : NULL;
  if (!scaled || (judges && !paid)) {
    free(scaled);
    free(paid);
    return 1;
  }
  float *found = scaled + rows * padded * wide, *lse = found + rows * heads * wide_v;
  uint8_t *visible = (uint8_t *)(found + parts * results);
  kv_queries(s->q, dtype, rows, heads, heads * dim, dim, dim, padded, wide, 0, s->scale, scaled);
  for (int64_t r = 0; holes && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) visible[r * columns + c] = s->position[r * slots + start + c] >= 0;
  Attention a = {.rows = rows, .heads = heads, .padded = padded, .queries = 1, .dim = wide, .dim_v = wide_v,
                 .columns = columns, .halves = dtype == BF16 ? s->scale : 0, .q = scaled,
                 .out = direct && !s->far ? (float *)s->out : found, .lse = lse};
  a.k = (Field){.layout = DENSE, .dim = dim, .dtype = dtype, .row_stride = slots * dim, .token_stride = dim,
                .data = s->keys + start * dim * size};
  a.v = (Field){.layout = DENSE, .dim = dim_v, .dtype = dtype, .row_stride = slots * dim_v, .token_stride = dim_v,
                .data = s->values + start * dim_v * size};
  a.scores = paid;
  for (int64_t i = 0; paid && holes && i < logits; i++) paid[i] = -INFINITY; /* nothing is written for no token */
  if (holes) a.visible = visible, a.visible_row = columns, a.visible_column = 1;
  share_work(&a, s->threads);
  int failed = kv_attention(&a);
  if (s->far && !failed) {
    Attention far = *s->far;
    far.rows = rows, far.heads = heads, far.padded = padded, far.queries = 1, far.dim = wide, far.dim_v = wide_v;
    far.halves = a.halves;
    far.q = scaled, far.out = found + results, far.lse = far.out + rows * heads * wide_v;
    share_work(&far, s->threads);
    failed = kv_attention(&far);
    if (!failed)
      kv_merge(far.out, far.lse, found, lse, rows * heads, wide_v, team(s->threads, 2 * rows * heads * wide_v),
               direct ? (float *)s->out : found, lse);
  }
  for (int64_t i = 0; !direct && !failed && i < rows * heads; i++)
    for (int64_t d = 0; d < dim_v; d++) put(s->out, i * dim_v + d, dtype, found[i * wide_v + d]);
  if (!failed) verdict(s, columns, across, paid, paid + logits, a.lse, a.threads);
  free(paid);
  free(scaled);
  return failed;
}
