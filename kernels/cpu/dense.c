/* Dense keys and values in bfloat16 by the matrix unit (AMX), which multiplies bfloat16 and adds in float32.

   Queries and weights are the sum of two bfloat16, their planes: 16 bits of the 24. Tiles:
     scores [token, row]    += keys [token, 32 channels]  * queries [32 channels, row]
     out    [row, channel]  += weights [row, 32 tokens]   * values [32 tokens, channel]
   the second operand by pairs along the inner axis. Keys are loaded from where they lie, if those of 16 tokens follow each
   other. */
#include "dense_inner.h"
#include "matrix.h"

#ifdef MATRIX_UNIT
typedef __m512i Line; /* 32 bfloat16 */

#define HIGH 16 /* query rows of a block */

static int open_tiles(const float *q, float scale, int64_t rows, int64_t dim, int64_t dim_v, Dense *x) {
  (void)scale; /* which is in the queries */
  struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  const int64_t wide = dim > dim_v ? dim : dim_v, lines = dim / 32;
  x->blocks = (rows + HIGH - 1) / HIGH;
  x->rows = rows;
  x->dim = dim;
  x->dim_v = dim_v;
  const int64_t queries = x->blocks * lines * 2 * 512, made = PAIR * TILE * wide, weights = PAIR * 2 * 512;
  const int64_t outs = x->blocks * HIGH * dim_v;
  x->queries = aligned_alloc(64, sizeof(uint16_t) * (queries + made + weights) + sizeof(float) * outs);
  if (!x->queries) return 0;
  x->made = x->queries + queries;
  x->weights = x->made + made;
  x->out = (float *)(x->weights + weights);
  memset(x->weights, 0, sizeof(uint16_t) * weights + sizeof(float) * outs);
  for (int64_t n = 0; n < x->blocks * HIGH; n++)
    for (int64_t line = 0; line < lines; line++) {
      uint32_t plane[2][16] = {{0}};
      if (n < rows) {
        Line first, second;
        planes_of(_mm512_loadu_ps(q + n * dim + line * 32), _mm512_loadu_ps(q + n * dim + line * 32 + 16), &first, &second);
        _mm512_storeu_si512(plane[0], first);
        _mm512_storeu_si512(plane[1], second);
      }
      uint32_t *to = (uint32_t *)(x->queries + (n / HIGH * lines + line) * 1024) + n % HIGH;
      for (int i = 0; i < 16; i++) to[16 * i] = plane[0][i], to[256 + 16 * i] = plane[1][i];
    }
  for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
  WRITTEN();
  _tile_loadconfig(&shape);
  return 1;
}

/* Where the keys of up to 16 tokens from `t` on are, and how far apart: copied, if they do not follow each other. */
static const void *keys_of(const Field *k, int64_t row, const Tokens *tokens, int t, int64_t dim, uint16_t *to,
                           int64_t *stride) {
  const int64_t *token = tokens->token + t;
  const int count = tokens->count - t < 16 ? tokens->count - t : 16;
  int run = 1;
  while (run < count && token[run] == token[0] + run) run++;
  *stride = 2 * k->token_stride;
  if (run == 16) return vector(k, row, token[0]);
  for (int i = 0; i < count; i++) memcpy(to + i * dim, vector(k, row, token[i]), 2 * dim);
  *stride = 2 * dim;
  return to;
}

/* One line of 16 keys, times queries that are loaded. */
#define MULTIPLY(part, tile)                                         \
  if (parts > part) {                                                \
    _tile_loadd(tile, at[part] + 64 * line, apart[part]);            \
    _tile_dpbf16ps(part, tile, 6);                                   \
    _tile_dpbf16ps(part, tile, 7);                                   \
    if (b == 0) ask(k, row, soon[part / 2], part % 2 * 16, part % 2 * 16 + 16, 64 * line); \
  }

/* scores[n][t] = q[n] . key[t] of two batches. `soon`: the next ones. */
static void dots(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
                 float *const *scores) {
  const int64_t lines = x->dim / 32;
  float found[4][256] __attribute__((aligned(64))); /* [16 tokens][token, row] */
  const char *at[4];
  int64_t apart[4];
  int parts = 0;
  for (int i = 0; i < PAIR; i++)
    for (int t = 0; t < tokens[i]->count; t += 16, parts++)
      at[parts] = keys_of(k, row, tokens[i], t, x->dim, x->made + 16 * parts * x->dim, &apart[parts]);
  for (int64_t b = 0; b < x->blocks; b++) {
    const uint16_t *q = x->queries + b * lines * 1024;
    WRITTEN();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t line = 0; line < lines; line++, q += 1024) {
      _tile_loadd(6, q, 64);
      _tile_loadd(7, q + 512, 64);
      MULTIPLY(0, 4)
      MULTIPLY(1, 5)
      MULTIPLY(2, 4)
      MULTIPLY(3, 5)
    }
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
    _tile_stored(2, found[2], 64);
    _tile_stored(3, found[3], 64);
    WRITTEN();
    for (int i = 0, part = 0; i < PAIR; i++)
      for (int t = 0; t < tokens[i]->count; t += 16, part++)
        for (int j = 0; j < 16; j += 4)
          put((const __m512 *)(found[part] + 16 * j), x->rows - b * HIGH, scores[i] + b * HIGH * TILE + t + j);
  }
}

/* out[n] += sum_t p[n][t] value[t] of two batches. */
static void weigh(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
                  Dense *x) {
  const int64_t dim = x->dim_v;
  const int both = tokens[1]->count > 0;
  uint16_t *const made[PAIR] = {x->made, x->made + TILE * dim};
  for (int i = 0; i <= both; i++) pairs_of(v, row, tokens[i], soon[i], dim, made[i]);
  for (int64_t b = 0; b < x->blocks; b++) {
    for (int i = 0; i <= both; i++)
      for (int64_t n = b * HIGH; n < (b + 1) * HIGH && n < x->rows; n++) {
        uint16_t *to = x->weights + i * 1024 + n % HIGH * 32;
        Line first, second;
        planes_of(_mm512_load_ps(p[i] + n * TILE), _mm512_load_ps(p[i] + n * TILE + 16), &first, &second);
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + 512, second);
      }
    WRITTEN();
    _tile_loadd(0, x->weights, 64);
    _tile_loadd(1, x->weights + 512, 64);
    _tile_loadd(2, x->weights + 1024, 64);
    _tile_loadd(3, x->weights + 1536, 64);
    float *out = x->out + b * HIGH * dim;
    for (int64_t d = 0; d < dim; d += 32, out += 32) {
      _tile_loadd(4, out, 4 * dim);
      _tile_loadd(7, out + 16, 4 * dim);
      _tile_loadd(5, made[0] + d * TILE, 64);
      _tile_loadd(6, made[0] + d * TILE + 512, 64);
      _tile_dpbf16ps(4, 0, 5);
      _tile_dpbf16ps(7, 0, 6);
      _tile_dpbf16ps(4, 1, 5);
      _tile_dpbf16ps(7, 1, 6);
      if (both) {
        _tile_loadd(5, made[1] + d * TILE, 64);
        _tile_loadd(6, made[1] + d * TILE + 512, 64);
        _tile_dpbf16ps(4, 2, 5);
        _tile_dpbf16ps(7, 2, 6);
        _tile_dpbf16ps(4, 3, 5);
        _tile_dpbf16ps(7, 3, 6);
      }
      _tile_stored(4, out, 4 * dim);
      _tile_stored(7, out + 16, 4 * dim);
    }
    WRITTEN();
  }
}

static void close_tiles(Dense *x, float *out) {
  unsort_pairs(x, out);
  _tile_release();
  free(x->queries);
}

const Way *dense_by_tiles(void) {
  static const Way way = {open_tiles, dots, weigh, close_tiles};
  return matrix_allowed() ? &way : NULL;
}
#else
const Way *dense_by_tiles(void) { return NULL; }
#endif
