/* Quest's bounds of units and their order: what the plain scan and the one through codes share. */
#ifndef KVENGINE_UNITS_H
#define KVENGINE_UNITS_H

#include "fields.h"

#define STEP 8

typedef struct {
  int64_t rows, group, padded, dim, units, threads, mean, each; /* dim: padded to MULTIPLE; `padded`: group up to a multiple of 4 */
  const float *q; /* [row, padded, 2 * dim]: the positive part, then the negative part */
  Field high, low;
  const uint8_t *alive; /* [row, unit], rows `alive_row` apart */
  int64_t alive_row;
  float *out;           /* [row, unit], or if `each` [row, group, unit] */
} Bounds;

/* For each of up to STEP units: reduce over the group of relu(q) . high - relu(-q) . low; `each`: room for all of it, or NULL. */
INLINE void score_units(const Bounds *b, int64_t row, const int64_t *unit, int count, float *tile, Memo *memo,
                        float *score, float *each) {
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
          if (each) each[(n + j) * STEP + i + t] = value;
        }
    }
    for (int t = 0; t < 2 && i + t < count; t++)
      score[i + t] = b->mean ? total[t] / b->group : best[t];
  }
}

/* Unsigned integers ordered as (score, lower id first); unique, so the k-th largest cuts off exactly k. */
INLINE uint64_t rank_of(float score, int64_t id, int64_t units) {
  uint32_t bits;
  score += 0.0f; /* -0 and 0 tie */
  memcpy(&bits, &score, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (uint64_t)(units - id);
}

/* The k-th largest of n numbers (1 <= k <= n); reorders x. Pivots are drawn: of those in a fixed place, numbers that fall and
   rise again would be the smallest every time, and the work grow as n * n. */
static inline uint64_t kth_rank(uint64_t *x, int64_t n, int64_t k) {
  int64_t from = 0, to = n - 1;
  uint32_t draw = 1u << 31;
  for (k--; from < to; draw = draw * 1664525u + 1013904223u) {
    const uint64_t pivot = x[from + (int64_t)((uint64_t)(to - from + 1) * draw >> 32)];
    int64_t i = from, j = to;
    while (i <= j) {
      while (x[i] > pivot) i++;
      while (x[j] < pivot) j--;
      if (i <= j) {
        const uint64_t swap = x[i];
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

#define BINS 1024

/* LANES of n numbers from the i-th on, -inf behind them. */
INLINE vf lanes_of(const float *x, int64_t n, int64_t i) {
  float rest[LANES];
  if (i + LANES <= n) return load(x + i);
  for (int j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : -INFINITY;
  return load(rest);
}

/* The k-th largest of n numbers or a little less, by counting them by size; -inf if fewer are above it, or no size tells them
   apart. What is no number counts as -inf. Nothing branches on a number, as nobody could predict it. */
static inline float about_kth(const float *x, int64_t n, int64_t k) {
  int32_t bins[BINS + 1] = {0}, place[LANES];
  const vf none = splat(-INFINITY);
  vf low = none, high = none;
  for (int64_t i = 0; i < n; i += LANES) {
    const vf y = lanes_of(x, n, i);
    const vi finite = (y > -INFINITY) & (y < INFINITY);
    low = larger(low, choose(finite, -y, none));
    high = larger(high, choose(finite, y, none));
  }
  const float least = -peak(low), most = peak(high), per = (BINS - 1) / (most - least);
  if (!(per > 0) || !(per < INFINITY)) return -INFINITY;
  for (int64_t i = 0; i < n; i += LANES) { /* -inf goes into a bin of its own, inf to the largest */
    const vf y = lanes_of(x, n, i), at = choose(y < most, (y - least) * per, splat(BINS - 1));
    *(vi *)place = __builtin_convertvector(choose(y > -INFINITY, at, splat(BINS)), vi);
    for (int j = 0; j < LANES; j++) bins[place[j]]++;
  }
  int64_t bin = BINS - 1, above = bins[bin];
  while (bin > 0 && above < k) above += bins[--bin];
  if (above < k) return -INFINITY;
  return least + ((float)bin - 0.01f) / per - 4e-7f * (fabsf(least) + fabsf(most)); /* less what rounding may do */
}

/* The k best of n scores in ascending order, and how many they are: none is -inf or no number. Of equal ones the earlier, or the
   `later`. `room`: for 2 * n numbers. */
static inline int64_t best_of(const float *x, int64_t n, int64_t k, int later, uint64_t *room, int64_t *ids) {
  if (k <= 0 || !n) return 0;
  const float cut = about_kth(x, n, k);
  int64_t m = 0, found = 0;
  for (int64_t i = 0; i < n; i++) {
    room[m] = rank_of(x[i], later ? n - 1 - i : i, n);
    m += !(x[i] < cut);
  }
  memcpy(room + m, room, sizeof *room * m);
  const uint64_t least = kth_rank(room + m, m, k < m ? k : m);
  const uint64_t nothing = rank_of(-INFINITY, 0, n), all = rank_of(INFINITY, 0, n); /* no score of either is beyond it */
  for (int64_t i = 0; i < m && found < k; i++)
    if (room[i] >= least && room[i] > nothing && room[i] <= all) {
      const int64_t id = n - (int64_t)(uint32_t)room[i];
      ids[found++] = later ? n - 1 - id : id;
    }
  return found;
}

#endif
