/* Quest's bounds of units and their order: what the plain scan and the one through codes share. */
#ifndef KVENGINE_UNITS_H
#define KVENGINE_UNITS_H

#include "fields.h"

#define STEP 8

typedef struct {
  int64_t rows, group, padded, dim, units, threads, mean; /* dim: padded to MULTIPLE; `padded`: group up to a multiple of 4 */
  const float *q; /* [row, padded, 2 * dim]: the positive part, then the negative part */
  Field high, low;
  const uint8_t *alive; /* [row, unit], rows `alive_row` apart */
  int64_t alive_row;
  float *out;           /* [row, unit] */
} Bounds;

/* For each of up to STEP units: reduce over the group of relu(q) . high - relu(-q) . low. */
INLINE void score_units(const Bounds *b, int64_t row, const int64_t *unit, int count, float *tile, Memo *memo,
                        float *score) {
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

/* NAME(x, n, k): the k-th largest of n numbers (1 <= k <= n); reorders x. Pivots are drawn: of those in a fixed place, numbers that
   fall and rise again would be the smallest every time, and the work grow as n * n. */
#define KTH_LARGEST(NAME, TYPE)                                                        \
  static inline TYPE NAME(TYPE *x, int64_t n, int64_t k) {                             \
    int64_t from = 0, to = n - 1;                                                      \
    uint32_t draw = 1u << 31;                                                          \
    for (k--; from < to; draw = draw * 1664525u + 1013904223u) {                       \
      const TYPE pivot = x[from + (int64_t)((uint64_t)(to - from + 1) * draw >> 32)];  \
      int64_t i = from, j = to;                                                        \
      while (i <= j) {                                                                 \
        while (x[i] > pivot) i++;                                                      \
        while (x[j] < pivot) j--;                                                      \
        if (i <= j) {                                                                  \
          const TYPE swap = x[i];                                                      \
          x[i++] = x[j];                                                               \
          x[j--] = swap;                                                               \
        }                                                                              \
      }                                                                                \
      if (k <= j) to = j;                                                              \
      else if (k >= i) from = i;                                                       \
      else break;                                                                      \
    }                                                                                  \
    return x[k];                                                                       \
  }

KTH_LARGEST(kth_rank, uint64_t)
KTH_LARGEST(kth_score, float)

#endif
