/* The best units of each row by shares of attention: of each head's softmax over the units' mean keys.

   A task has the logits of BLOCK units. Whoever ends a row's last one decides: which units are read whatever the queries are,
   each head's sum over the others, and what the heads together want most. */
#include <stdlib.h>
#include "units.h"
#include "vectors.h"

#define BLOCK 512

typedef struct {
  int64_t rows, group, padded, dim, units, count, threads; /* `padded`: group up to a multiple of 4; dim: to one of MULTIPLE */
  int64_t added, first; /* whether a group's shares are added, or the largest counts; whether the first living unit is read */
  const char *given;    /* the queries [row, group, given_dim] as they are; elements from row to row, head to head */
  int64_t given_dtype, given_dim, given_row, given_head;
  Field mean;
  const uint8_t *alive; /* [row, unit], rows `alive_row` apart */
  int64_t alive_row;
  const void *coherence; /* [row, unit]: the least coherent are read; NULL: none for that */
  int64_t coherence_dtype, coherence_row;
  const int64_t *counts; /* [row]: how many units each may have; NULL: `count` */
  float scale, softcap, outliers; /* softcap 0: none; outliers: the part of the units read that are the least coherent */
  int64_t *ids; /* [row, count] */
} Shares;

/* Logits of a block's living units [head, unit], `stride` from head to head; -inf of the others, and inf of what is no number. */
static void block_logits(const Shares *s, int64_t row, int64_t from, int64_t to, const float *q, float *logits, int64_t stride) {
  const Field *f = &s->mean;
  const uint8_t *alive = s->alive + row * s->alive_row;
  const int lies = plain(f, s->dim, s->padded), halved = HALVES && lies && f->dtype == BF16 && s->given_dtype == BF16;
  const int64_t size = f->dtype == F32 ? 4 : 2, all = s->padded * s->dim;
  const char *at[BLOCK + 2 * BATCH];
  int64_t unit[BLOCK];
  float tile[BATCH * s->dim] __attribute__((aligned(64))), score[s->padded * TILE];
  float sorted[lies ? all : 1];
  int count = 0;
  Memo memo;
  memo.from = memo.to = 0;
  for (int64_t u = from; u < to; u++) {
    unit[count] = u;
    count += alive[u] != 0;
  }
  for (int64_t h = 0; h < s->group; h++)
    for (int64_t u = from; u < to; u++) logits[h * stride + u] = -INFINITY;
  for (int i = 0; lies && i < BLOCK + 2 * BATCH && count; i++) /* those behind the last are computed with, never seen */
    at[i] = (const char *)f->data + (row * f->row_stride + unit[i < count ? i : count - 1] * f->token_stride) * size;
  for (int i = 0; !lies && i < BATCH; i++) at[i] = (const char *)(tile + i * s->dim);
  if (!lies) memset(tile, 0, sizeof tile);
#if HALVES
  if (halved) halve(q, 1, all, (uint16_t *)sorted);
#endif
  if (lies && f->dtype == BF16 && !halved) {
    sort(q, all, sorted);
    q = sorted;
  }
  for (int i = 0; i < count; i += BATCH) {
    const int n = count - i < BATCH ? count - i : BATCH;
    const char *const *now = lies ? at + i : at;
    if (!lies) read_tokens(f, &memo, row, unit + i, n, tile, s->dim);
#if HALVES
    if (halved) dots_halved((const uint16_t *)sorted, 1, now, now + BATCH, n, s->dim, score);
    else
#endif
    dots(q, s->padded, now, lies ? now + BATCH : NULL, n, s->dim, score, lies ? f->dtype : F32);
    for (int64_t h = 0; h < s->group; h++) {
      float *x = score + h * TILE;
      for (int t = 0; t < BATCH; t += LANES) {
        vf y = load(x + t) * s->scale;
        if (s->softcap > 0) y = capped(y, s->softcap);
        store(x + t, choose(y == y, y, splat(INFINITY)));
      }
      for (int t = 0; t < n; t++) logits[h * stride + unit[i + t]] = x[t];
    }
  }
}

/* The logarithm of the sum of e^x; what is infinite takes no part. */
static float log_sum(const float *x, int64_t n) {
  const vf none = splat(-INFINITY);
  vf high = none, total = {0};
  for (int64_t i = 0; i < n; i += LANES) high = larger(high, choose(load(x + i) < INFINITY, load(x + i), none));
  const float top = peak(high);
  if (top == -INFINITY) return 0;
  for (int64_t i = 0; i < n; i += LANES) total += fading(choose(load(x + i) < INFINITY, load(x + i) - top, none));
  return top + logf(sum(total));
}

/* want[u] = the largest logarithm of a share, or that of their sum, so that no unit is too small to be told from another */
static void reduce(const Shares *s, const float *logits, int64_t stride, float *want) {
  float lse[s->group];
  for (int64_t h = 0; h < s->group; h++) lse[h] = s->group > 1 ? log_sum(logits + h * stride, stride) : 0;
  for (int64_t u = 0; u < stride; u += LANES) {
    vf high = splat(-INFINITY), total = {0};
    for (int64_t h = 0; h < s->group; h++) high = larger(high, load(logits + h * stride + u) - lse[h]);
    store(want + u, high);
    if (!s->added || s->group == 1) continue;
    for (int64_t h = 0; h < s->group; h++) total += fading(load(logits + h * stride + u) - lse[h] - high);
    for (int j = 0; j < LANES; j++)
      if (fabsf(want[u + j]) < INFINITY) want[u + j] += logf(total[j]);
  }
}

/* From a row's logits, `stride` numbers for each head, to its units. Returns 0, or 1 without memory. */
static int decide(const Shares *s, int64_t row, float *logits, int64_t stride) {
  const uint8_t *alive = s->alive + row * s->alive_row;
  const int64_t most = s->counts && s->counts[row] < s->count ? s->counts[row] : s->count, units = s->units;
  int64_t *const ids = s->ids + row * s->count, forced = 0;
  uint64_t *room = malloc(sizeof(uint64_t) * 2 * units + sizeof(float) * stride);
  if (!room) return 1;
  float *const want = (float *)(room + 2 * units);
  for (int64_t h = 0; h < s->group; h++) /* the last register is computed with whole */
    for (int64_t u = units; u < stride; u++) logits[h * stride + u] = -INFINITY;
  if (s->coherence && most > 0) {
    widen_run(s->coherence, row * s->coherence_row, units, s->coherence_dtype, want);
    for (int64_t u = 0; u < units; u++) want[u] = alive[u] ? -want[u] : -INFINITY;
    forced = best_of(want, units, (int64_t)((float)most * s->outliers), 1, room, ids);
    for (int64_t h = 0; h < s->group; h++)
      for (int64_t i = 0; i < forced; i++) logits[h * stride + ids[i]] = -INFINITY;
  }
  reduce(s, logits, stride, want);
  for (int64_t i = 0; i < forced; i++) want[ids[i]] = INFINITY;
  for (int64_t u = 0; s->first && u < units; u++)
    if (alive[u]) {
      want[u] = INFINITY;
      break;
    }
  for (int64_t i = best_of(want, units, most, 0, room, ids); i < s->count; i++) ids[i] = -1;
  free(room);
  return 0;
}

/* Returns 0, or 1 without memory. */
int kv_shares(const Shares *s) {
  const int64_t blocks = (s->units + BLOCK - 1) / BLOCK, stride = (s->units + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
  const int64_t all = s->padded * s->dim, each = s->group * stride, rows = s->rows;
  if (!s->count || !rows || !blocks) return 0;
  float *q = aligned_alloc(64, (sizeof(float) * rows * (all + each) + sizeof(int) * rows + 63) / 64 * 64);
  if (!q) return 1;
  float *const logits = q + rows * all;
  int *const left = (int *)(logits + rows * each), failed = 0;
  kv_queries(s->given, s->given_dtype, rows, s->group, s->given_row, s->given_head, s->given_dim, s->padded, s->dim, 0, 1, q);
  for (int64_t row = 0; row < rows; row++) left[row] = (int)blocks;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads) reduction(| : failed)
  for (int64_t i = 0; i < rows * blocks; i++) {
    const int64_t row = i / blocks, from = i % blocks * BLOCK, to = from + BLOCK < s->units ? from + BLOCK : s->units;
    float *const mine = logits + row * each;
    block_logits(s, row, from, to, q + row * all, mine, stride);
    if (__atomic_sub_fetch(&left[row], 1, __ATOMIC_ACQ_REL) == 0) failed |= decide(s, row, mine, stride);
  }
  free(q);
  return failed;
}
