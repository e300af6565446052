/* Bounds of units (Quest) and the best units of each row. */
#include <stdlib.h>
#include "units.h"

#define BLOCK 256

int kv_bounds(const Bounds *b) {
  const int64_t blocks = (b->units + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(b->threads)
  for (int64_t i = 0; i < b->rows * blocks; i++) {
    int64_t row = i / blocks, from = i % blocks * BLOCK, to = from + BLOCK < b->units ? from + BLOCK : b->units;
    float tile[STEP * 2 * b->dim] __attribute__((aligned(64)));
    float score[STEP];
    int64_t unit[STEP];
    int count = 0;
    Memo memo;
    memo.from = memo.to = 0;
    memset(tile, 0, sizeof tile);
    for (int64_t u = from; u < to; u++) { /* a dead unit's bounds are not read */
      if (b->alive[row * b->alive_row + u]) unit[count++] = u;
      else b->out[row * b->units + u] = -INFINITY;
      if (count == STEP || (u + 1 == to && count)) {
        score_units(b, row, unit, count, tile, &memo, score);
        for (int j = 0; j < count; j++) b->out[row * b->units + unit[j]] = score[j];
        count = 0;
      }
    }
  }
  return 0;
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
    uint64_t least = kth_rank(x, units, count);
    int64_t n = 0;
    for (int64_t u = 0; u < units && n < count; u++)
      if (s[u] > -INFINITY && rank_of(s[u], u, units) >= least) ids[row * count + n++] = u;
    for (; n < count; n++) ids[row * count + n] = -1;
    free(x);
  }
  return failed;
}

/* keep [row, token]: the count[row] best tokens; of equal ones the later. Returns 0, or 1 without memory. */
int kv_best(const float *scores, const int64_t *count, int64_t rows, int64_t tokens, int64_t threads, uint8_t *keep) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t row = 0; row < rows; row++) {
    const float *s = scores + row * tokens;
    uint8_t *mine = keep + row * tokens;
    int64_t n = count[row] < tokens ? count[row] : tokens;
    uint64_t least = n > 0 ? 0 : UINT64_MAX, *x = NULL;
    if (0 < n && n < tokens) {
      if (!(x = malloc(sizeof(uint64_t) * tokens))) {
        failed = 1;
        continue;
      }
      for (int64_t t = 0; t < tokens; t++) x[t] = rank_of(s[t], tokens - 1 - t, tokens);
      least = kth_rank(x, tokens, n);
      free(x);
    }
    for (int64_t t = 0; t < tokens; t++) mine[t] = s[t] > -INFINITY && rank_of(s[t], tokens - 1 - t, tokens) >= least;
  }
  return failed;
}
