/* Bounds of units (Quest) and the best units of each row. */
#include <stdlib.h>
#include "units.h"

#define BLOCK 256

int kv_bounds(const Bounds *b) {
  const int64_t blocks = (b->units + BLOCK - 1) / BLOCK, heads = b->each ? b->group : 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(b->threads)
  for (int64_t i = 0; i < b->rows * blocks; i++) {
    int64_t row = i / blocks, from = i % blocks * BLOCK, to = from + BLOCK < b->units ? from + BLOCK : b->units;
    float tile[STEP * 2 * b->dim] __attribute__((aligned(64)));
    float score[STEP], each[heads * STEP];
    const float *const found = b->each ? each : score;
    float *const out = b->out + row * heads * b->units;
    int64_t unit[STEP];
    int count = 0;
    Memo memo;
    memo.from = memo.to = 0;
    memset(tile, 0, sizeof tile);
    for (int64_t u = from; u < to; u++) { /* a dead unit's bounds are not read */
      if (b->alive[row * b->alive_row + u]) unit[count++] = u;
      else
        for (int64_t n = 0; n < heads; n++) out[n * b->units + u] = -INFINITY;
      if (count == STEP || (u + 1 == to && count)) {
        score_units(b, row, unit, count, tile, &memo, score, b->each ? each : NULL);
        for (int64_t n = 0; n < heads; n++)
          for (int j = 0; j < count; j++) out[n * b->units + unit[j]] = found[n * STEP + j];
        count = 0;
      }
    }
  }
  return 0;
}

/* ids [row, count]: the best units in ascending order, then -1, of those `alive` [row, unit] (NULL: all); counts: how many a row
   may have (NULL: `count`). Returns 0, or 1 without memory. */
int kv_top(const float *scores, int64_t rows, int64_t units, int64_t count, int64_t threads, int64_t row_stride,
           const uint8_t *alive, int64_t alive_row, const int64_t *counts, int64_t *ids) {
  int failed = 0;
  if (!count) return 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t row = 0; row < rows; row++) {
    const float *s = scores + row * row_stride;
    uint64_t *room = malloc(sizeof(uint64_t) * 2 * units + sizeof(float) * units);
    if (!room) {
      failed = 1;
      continue;
    }
    if (alive) {
      float *const living = (float *)(room + 2 * units);
      for (int64_t u = 0; u < units; u++) living[u] = alive[row * alive_row + u] ? s[u] : -INFINITY;
      s = living;
    }
    int64_t *const mine = ids + row * count;
    const int64_t n = best_of(s, units, counts && counts[row] < count ? counts[row] : count, 0, room, mine);
    for (int64_t i = n; i < count; i++) mine[i] = -1;
    free(room);
  }
  return failed;
}

/* keep [row, token]: the count[row] best tokens; of equal ones the later. Returns 0, or 1 without memory. */
int kv_best(const float *scores, const int64_t *count, int64_t rows, int64_t tokens, int64_t threads, uint8_t *keep) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t row = 0; row < rows; row++) {
    uint8_t *mine = keep + row * tokens;
    memset(mine, 0, tokens);
    int64_t n = count[row] < tokens ? count[row] : tokens;
    if (n <= 0) continue;
    uint64_t *room = malloc(sizeof(uint64_t) * 3 * tokens);
    if (!room) {
      failed = 1;
      continue;
    }
    int64_t *ids = (int64_t *)(room + 2 * tokens);
    n = best_of(scores + row * tokens, tokens, n, 1, room, ids);
    for (int64_t i = 0; i < n; i++) mine[ids[i]] = 1;
    free(room);
  }
  return failed;
}
