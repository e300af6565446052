/* The attention that each token receives from a prompt's queries, or the most that one of them pays, in float32; bfloat16 is multiplied by the matrix unit or
   by pairs.

   A task is some blocks of queries of one KV head, all its query heads together. A block takes TILE tokens at a time:
   their keys are turned on their side, and the scores of some query rows are made and softened as in causal.c. The
   weights are kept until the rows' totals are known, with the `top` that each row had by then, and then summed: scores
   are computed once, and those of one block are kept. A task has its own sums, so that none are raced for. */
#include <stdlib.h>
#include "matrix.h"
#include "prompt.h"

#define ROWS 256       /* query rows of a block, about */
#define SIXTEEN 16     /* rows that are multiplied together in bfloat16 */
#define MOST (4 << 20) /* weights of a block, about: 16 MB */
#define LINE 16        /* floats of a cache line */

typedef struct {
  int64_t rows, group, queries, tokens, dim, parts, threads, q_dtype, k_dtype;
  float scale, softcap; /* 0: none */
  const void *q, *k;
  int64_t q_row, q_head, q_query, k_row, k_token;
  const int32_t *position; /* [row, token]: negative where there is no token */
  const int64_t *at;       /* [query]: its slot */
  const uint8_t *real;     /* [row, query]: whether it counts */
  const int64_t *first;    /* [row]: the first token; NULL: nothing is hidden but what comes later */
  const float *logits;     /* [row, head]: join the softmax; NULL: there are none */
  int64_t position_row, real_row, sinks, local; /* seen: `sinks` first, `local` last ones */
  int64_t most;            /* whether the most of what queries pay is asked for, not the sum */
  float *out;              /* [part, row, head, token] */
} Mass;

/* What is kept of a block. */
typedef struct {
  float *q, *key;              /* EIGHT rows side by side; a tile of keys on its side */
  float *total, *last, *share; /* [row, lane], [row]: sums of weights below the `last` top; what such a weight's share is */
  float *top, *weight;         /* [tile, row], [tile, row, token]: e^(score - top); no weights where that is -inf */
  int64_t *seen, *tile;        /* [row]: the last slot that it sees, -1 for none; [tile]: its first token */
  int64_t together;            /* rows that are computed with together: EIGHT, or SIXTEEN in bfloat16 */
  int matrix;                  /* whether by the matrix unit */
} Block;

/* Whether queries stay as they are, and keys on their side are pairs of channels. */
static int paired(const Mass *a) {
  if (!HALVES || a->q_dtype != 1 || a->k_dtype != 1) return 0;
  return !(a->dim % 32 || a->k_row % 2 || a->k_token % 2);
}

#ifdef MATRIX_UNIT
static int matrix_there(void) { return matrix_allowed(); }

static void open_matrix(void) {
  struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 7; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
  WRITTEN();
  _tile_loadconfig(&shape);
}

static void close_matrix(void) { _tile_release(); }

/* As `pairs_product`, of SIXTEEN rows. */
static void multiply(const uint16_t *q, const float *key, int64_t dim, float *s) {
  WRITTEN();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32, q += 32, key += 16 * TILE) {
    _tile_loadd(4, q, 2 * dim);
    _tile_loadd(5, key, 4 * TILE);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, key + 16, 4 * TILE);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, key + 32, 4 * TILE);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, key + 48, 4 * TILE);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, s, 4 * TILE);
  _tile_stored(1, s + 16, 4 * TILE);
  _tile_stored(2, s + 32, 4 * TILE);
  _tile_stored(3, s + 48, 4 * TILE);
  WRITTEN();
}
#else
static int matrix_there(void) { return 0; }
static void open_matrix(void) {}
static void close_matrix(void) {}
static void multiply(const uint16_t *q, const float *key, int64_t dim, float *s) {
  (void)q, (void)key, (void)dim, (void)s;
}
#endif

static void lay_keys(const Mass *a, int64_t row, int64_t t, int64_t n, int halves, float *key) {
  const int64_t start = row * a->k_row + t * a->k_token;
  if (halves) lay(a->k, start / 2, a->k_token / 2, 0, n, a->dim / 2, key);
  else if (a->k_dtype == 0) lay(a->k, start, a->k_token, 0, n, a->dim, key);
  else if (a->k_dtype == 1) lay(a->k, start, a->k_token, 1, n, a->dim, key);
  else lay(a->k, start, a->k_token, 2, n, a->dim, key);
}

/* Queries [first, first + size) of a KV head; how far the last of them sees. */
static int64_t open_block(const Mass *a, int64_t row, int64_t first, int64_t size, Block *b) {
  int64_t end = 0;
  for (int64_t m = 0; m < a->group * size; m++) {
    const int64_t i = first + m % size, head = m / size, real = i < a->queries && a->real[row * a->real_row + i];
    const int64_t from = row * a->q_row + head * a->q_head + i * a->q_query;
    float *to = b->q + m / EIGHT * EIGHT * a->dim + m % EIGHT;
    uint16_t *half = (uint16_t *)b->q + m * a->dim;
    if (b->together == EIGHT)
      for (int64_t d = 0; d < a->dim; d++) to[d * EIGHT] = real ? value_at(a->q, from + d, a->q_dtype) * a->scale : 0;
    else if (real) memcpy(half, (const uint16_t *)a->q + from, sizeof *half * a->dim);
    else memset(half, 0, sizeof *half * a->dim);
    b->seen[m] = real ? a->at[i] : -1;
    if (b->seen[m] >= end) end = b->seen[m] + 1;
    b->last[m] = a->logits ? a->logits[row * a->group + head] : -INFINITY;
    store(b->total + m * LANES, splat(0));
    if (b->last[m] > -INFINITY) b->total[m * LANES] = 1;
  }
  return end;
}

/* Whether any of some rows sees one of `n` tokens from `t` on, if there are such. */
static int any(const Mass *a, int64_t row, const int64_t *seen, int64_t rows, int64_t t, int64_t n) {
  int64_t far = -1, near = INT64_MAX;
  for (int64_t i = 0; i < rows; i++) {
    if (seen[i] > far) far = seen[i];
    if (seen[i] >= 0 && seen[i] < near) near = seen[i];
  }
  return far >= t && !(a->first && t >= a->first[row] + a->sinks && t + n <= near - a->local + 1);
}

/* The weights of some rows from `m` on for the tile of `n` tokens at `t`. */
static void weigh(const Mass *a, int64_t row, int64_t m, int64_t t, int64_t n, const int32_t *gap, Block *b, float *s) {
  const int halves = b->together == SIXTEEN;
  const uint16_t *q = (const uint16_t *)b->q + m * a->dim;
  if (b->matrix) multiply(q, b->key, a->dim, s);
  else if (halves) pairs_product(q, SIXTEEN, b->key, a->dim, s);
  else products(b->q + m * a->dim, 1, EIGHT, b->key, TILE, a->dim, s, TILE, TILE, 0);
  for (int64_t i = 0; i < b->together; i++, s += TILE) {
    const int64_t seen = b->seen[m + i], far = seen + 1 - t, near = far - a->local;
    for (int64_t j = 0; halves && j < TILE; j += LANES) store(s + j, load(s + j) * a->scale);
    if (a->softcap > 0) cap(s, TILE, a->softcap);
    hide(s, far < n ? far : n, TILE);
    if (a->first) hide(s, a->first[row] + a->sinks - t, near < n ? near : n);
    for (int64_t j = 0; gap && j < TILE; j += LANES)
      store(s + j, choose(*(const vi *)(gap + j), splat(-INFINITY), load(s + j)));
    soften(s, TILE, b->last + m + i, b->total + (m + i) * LANES, NULL, 0);
  }
}

/* What tile number `k` got, to `sums` [head, token]. */
static void add_up(const Mass *a, int64_t k, int64_t size, const Block *b, float *sums) {
  const int64_t rows = a->group * size, t = b->tile[k], n = t + TILE < a->tokens ? TILE : a->tokens - t;
  const float *top = b->top + k * (rows + LANES), *weight = b->weight + k * rows * TILE;
  for (int64_t head = 0; head < a->group; head++) {
    vf all[TILE / LANES] = {0};
    float sum[TILE], factor[EIGHT + LANES], *to = sums + head * a->tokens + t;
    for (int64_t m = head * size; m < (head + 1) * size; m += EIGHT) {
      for (int i = 0; i < EIGHT; i += LANES)
        store(factor + i, fading(load(top + m + i) - load(b->last + m + i)) * load(b->share + m + i));
      for (int i = 0; i < EIGHT; i++) {
        if (top[m + i] == -INFINITY) continue;
        for (int j = 0; j < TILE / LANES; j++) {
          const vf paid = splat(factor[i]) * load(weight + (m + i) * TILE + j * LANES);
          if (a->most) all[j] = larger(all[j], paid);
          else all[j] += paid;
        }
      }
    }
    for (int j = 0; j < TILE / LANES; j++) store(sum + j * LANES, all[j]);
    for (int64_t j = 0; j < n; j++) to[j] = !a->most ? to[j] + sum[j] : to[j] > sum[j] ? to[j] : sum[j];
  }
}

static void take(const Mass *a, int64_t row, int64_t first, int64_t size, Block *b, float *sums) {
  const int64_t rows = a->group * size, end = open_block(a, row, first, size, b);
  int64_t tiles = 0;
  int32_t gap[TILE];
  for (int64_t t = 0; t < end; t += TILE) {
    const int64_t n = t + TILE < a->tokens ? TILE : a->tokens - t;
    const int64_t none = gaps(a->position + row * a->position_row + t, n, gap);
    float *top = b->top + tiles * (rows + LANES), *weight = b->weight + tiles * rows * TILE;
    int laid = 0;
    for (int64_t m = 0; m < rows && none < n; m += b->together) {
      const int some = any(a, row, b->seen + m, b->together, t, n);
      if (some && !laid++) lay_keys(a, row, t, n, b->together == SIXTEEN, b->key);
      if (some) weigh(a, row, m, t, n, none ? gap : NULL, b, weight + m * TILE);
      for (int64_t i = 0; i < b->together; i++) top[m + i] = some ? b->last[m + i] : -INFINITY;
    }
    if (laid) b->tile[tiles++] = t;
  }
  for (int64_t m = 0; m < rows; m++) {
    const float all = sum(load(b->total + m * LANES));
    b->share[m] = all > 0 ? 1 / all : 0;
  }
  for (int64_t k = 0; k < tiles; k++) add_up(a, k, size, b, sums);
}

/* The next `n` numbers of a buffer, from a cache line's start. */
static float *part(float **from, int64_t n) {
  float *at = *from;
  *from += (n + LINE - 1) / LINE * LINE;
  return at;
}

static float *place(Block *b, const Mass *a, int64_t rows) {
  const int64_t tiles = (a->tokens + TILE - 1) / TILE, wide = rows + LANES;
  const int64_t need = (rows + TILE) * a->dim + rows * LANES + 4 * wide + tiles * (wide + rows * TILE + 2) + 9 * LINE;
  float *all = aligned_alloc(64, sizeof(float) * ((need + 2 * rows) / LINE + 1) * LINE), *at = all;
  if (!all) return NULL;
  b->q = part(&at, rows * a->dim);
  b->key = part(&at, TILE * a->dim);
  b->total = part(&at, rows * LANES);
  b->last = part(&at, wide);
  b->share = part(&at, wide);
  b->seen = (int64_t *)part(&at, 2 * rows);
  b->tile = (int64_t *)part(&at, 2 * tiles);
  b->top = part(&at, tiles * wide);
  b->weight = part(&at, tiles * rows * TILE);
  return all;
}

/* q [row, head, query, dim] and k [row, token, dim] by strides, the last of which is 1; `dim` is a multiple of MULTIPLE. Part
   i of n takes every n-th block, from the i-th on. Returns 0, or 1 if memory for the buffers cannot be had. */
int kv_mass(const Mass *a) {
  const int halves = paired(a), matrix = halves && matrix_there();
  int64_t size = halves ? SIXTEEN : EIGHT;
  while (2 * size * a->group <= ROWS && size < a->queries && 2 * size * a->group * a->tokens <= MOST) size *= 2;
  int failed = 0;
#pragma omp parallel num_threads(a->threads)
  {
    Block b = {.together = halves ? SIXTEEN : EIGHT, .matrix = matrix};
    float *space = place(&b, a, a->group * size);
    if (!space) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    if (matrix) open_matrix();
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a->parts * a->rows; i++) {
      float *sums = a->out + i * a->group * a->tokens;
      memset(sums, 0, sizeof(float) * a->group * a->tokens);
      for (int64_t first = i / a->rows * size; space && first < a->queries; first += a->parts * size)
        take(a, i % a->rows, first, size, &b, sums);
    }
    if (matrix) close_matrix();
    free(space);
  }
  return failed;
}
