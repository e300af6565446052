/* Bounds of units (Quest) and the best units of each row. */
#include <stdlib.h>
#include "fields.h"

typedef struct {
  int64_t rows, group, padded, dim, units, threads, mean; /* dim: padded to LANES; `padded`: group up to a multiple of 4 */
  const float *q; /* [row, padded, 2 * dim]: the positive part, then the negative part */
  Field high, low;
  const uint8_t *alive; /* [row, unit], rows `alive_row` apart */
  int64_t alive_row;
  float *out;           /* [row, unit] */
} Bounds;

#define STEP 8
#define BLOCK 256

/* For each of STEP units: reduce over the group of relu(q) . high - relu(-q) . low. */
static void bound(const Bounds *b, int64_t row, const int64_t *unit, int count, float *tile, Memo *memo) {
  const int64_t wide = 2 * b->dim;
  read_tokens(&b->high, memo, row, unit, count, tile, wide);
  read_tokens(&b->low, memo, row, unit, count, tile + b->dim, wide);
  const float *q = b->q + row * b->padded * wide;
  for (int i = 0; i < count; i += 2) {
    const float *x = tile + i * wide;
    float best[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
    for (int64_t n = 0; n < b->padded; n += 4) {
      vf s[4][2] = {{{0}}};
      for (int64_t d = 0; d < wide; d += LANES) {
        vf x0 = load(x + d), x1 = load(x + wide + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          vf y = load(q + (n + j) * wide + d);
          s[j][0] += y * x0;
          s[j][1] += y * x1;
        }
      }
      for (int j = 0; j < 4 && n + j < b->group; j++)
        for (int t = 0; t < 2; t++) {
          float value = sum(s[j][t]);
          if (value > best[t]) best[t] = value;
          total[t] += value;
        }
    }
    for (int t = 0; t < 2 && i + t < count; t++)
      b->out[row * b->units + unit[i + t]] = b->mean ? total[t] / b->group : best[t];
  }
}

int kv_bounds(const Bounds *b) {
  const int64_t blocks = (b->units + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(b->threads)
  for (int64_t i = 0; i < b->rows * blocks; i++) {
    int64_t row = i / blocks, from = i % blocks * BLOCK, to = from + BLOCK < b->units ? from + BLOCK : b->units;
    float tile[STEP * 2 * b->dim] __attribute__((aligned(64)));
    int64_t unit[STEP];
    int count = 0;
    Memo memo;
    memo.from = memo.to = 0;
    memset(tile, 0, sizeof tile);
    for (int64_t u = from; u < to; u++) { /* a dead unit's bounds are not read */
      if (b->alive[row * b->alive_row + u]) unit[count++] = u;
      else b->out[row * b->units + u] = -INFINITY;
      if (count == STEP || (u + 1 == to && count)) {
        bound(b, row, unit, count, tile, &memo);
        count = 0;
      }
    }
  }
  return 0;
}

/* Unsigned integers ordered as (score, lower id first); unique, so the k-th largest cuts off exactly k. */
INLINE uint64_t rank_of(float score, int64_t id, int64_t units) {
  uint32_t bits;
  score += 0.0f; /* -0 and 0 tie */
  memcpy(&bits, &score, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (uint64_t)(units - id);
}

/* The k-th largest of x (k >= 1); reorders x. */
static uint64_t kth(uint64_t *x, int64_t n, int64_t k) {
  int64_t from = 0, to = n - 1;
  k--;
  while (from < to) {
    uint64_t pivot = x[from + (to - from) / 2];
    int64_t i = from, j = to;
    while (i <= j) {
      while (x[i] > pivot) i++;
      while (x[j] < pivot) j--;
      if (i <= j) {
        uint64_t swap = x[i];
        x[i++] = x[j];
        x[j--] = swap;
      }
    }
    if (k <= j) to = j;
    else if (k >= i) from = i;
    else break;
  }
  return x[k];
}

/* ids [row, count]: the best units in ascending order, then -1. Returns 0, or 1 without memory. */
int kv_top(const float *scores, int64_t rows, int64_t units, int64_t count, int64_t threads, int64_t *ids) {
  int failed = 0;
  if (!count) return 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t row = 0; row < rows; row++) {
    const float *s = scores + row * units;
    uint64_t *x = malloc(sizeof(uint64_t) * units);
    if (!x) {
      failed = 1;
      continue;
    }
    for (int64_t u = 0; u < units; u++) x[u] = rank_of(s[u], u, units);
    uint64_t least = kth(x, units, count);
    int64_t n = 0;
    for (int64_t u = 0; u < units && n < count; u++)
      if (s[u] > -INFINITY && rank_of(s[u], u, units) >= least) ids[row * count + n++] = u;
    for (; n < count; n++) ids[row * count + n] = -1;
    free(x);
  }
  return failed;
}
