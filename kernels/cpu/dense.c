/* Dense keys and values in bfloat16 by the matrix unit (AMX), which multiplies bfloat16 and adds in float32.

   Queries and weights are the sum of two bfloat16, their planes: 16 bits of the 24. Tiles:
     scores [token, row]    += keys [token, 32 channels]  * queries [32 channels, row]
     out    [row, channel]  += weights [row, 32 tokens]   * values [32 tokens, channel]
   the second operand by pairs along the inner axis. Keys are loaded from where they lie, if those of 16 tokens follow each
   other. */
#include <stdlib.h>
#include "dense.h"
#include "matrix.h"

#ifdef MATRIX_UNIT
typedef __m512i Line; /* 32 bfloat16 */

#define HIGH 16 /* query rows of a block */

/* Few rows are as fast by vectors, which keep all bits. */
int dense_fit(const Field *k, const Field *v, int64_t dim, int64_t dim_v, int64_t rows) {
  if (rows <= 4) return 0;
  if (k->layout != DENSE || v->layout != DENSE || k->dtype != BF16 || v->dtype != BF16) return 0;
  if (k->dim != dim || v->dim != dim_v || dim % 32 || dim_v % 32) return 0;
  return matrix_allowed();
}

/* The nearest bfloat16 of `b` above those of `a`, and what they leave. */
INLINE Line nearest(__m512 a, __m512 b) { return (Line)_mm512_cvtne2ps_pbh(b, a); }

INLINE void planes_of(__m512 a, __m512 b, Line *first, Line *second) {
  const Line high = nearest(a, b);
  const __m512 low_a = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
  const __m512 low_b = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
  *first = high;
  *second = nearest(_mm512_sub_ps(a, low_a), _mm512_sub_ps(b, low_b));
}

int dense_open(const float *q, int64_t rows, int64_t dim, int64_t dim_v, Dense *x) {
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

INLINE const char *vector(const Field *f, int64_t row, int64_t token) {
  return (const char *)f->data + 2 * (row * f->row_stride + token * f->token_stride);
}

/* Ask for a line of each of the next batch's vectors. */
INLINE void ask(const Field *f, int64_t row, const Tokens *soon, int from, int to, int64_t byte) {
  for (int t = from; t < to && t < soon->count; t++) __builtin_prefetch(vector(f, row, soon->token[t]) + byte, 0, 2);
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

/* scores[row][t] of 4 tokens by 16 rows: within each 128 bits, a transposition. */
INLINE void turn(const float *found, int64_t rows, float *scores) {
  const __m512 y0 = _mm512_load_ps(found), y1 = _mm512_load_ps(found + 16);
  const __m512 y2 = _mm512_load_ps(found + 32), y3 = _mm512_load_ps(found + 48);
  const __m512 a = _mm512_unpacklo_ps(y0, y1), b = _mm512_unpackhi_ps(y0, y1);
  const __m512 c = _mm512_unpacklo_ps(y2, y3), d = _mm512_unpackhi_ps(y2, y3);
  const __m512 z[4] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee), _mm512_shuffle_ps(b, d, 0x44),
                       _mm512_shuffle_ps(b, d, 0xee)};
  for (int i = 0; i < 4; i++) {
    _mm_storeu_ps(scores + i * TILE, _mm512_castps512_ps128(z[i]));
    if (rows > 4) _mm_storeu_ps(scores + (4 + i) * TILE, _mm512_extractf32x4_ps(z[i], 1));
    if (rows > 8) _mm_storeu_ps(scores + (8 + i) * TILE, _mm512_extractf32x4_ps(z[i], 2));
    if (rows > 12) _mm_storeu_ps(scores + (12 + i) * TILE, _mm512_extractf32x4_ps(z[i], 3));
  }
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
void dense_dots(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
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
          turn(found[part] + 16 * j, x->rows - b * HIGH, scores[i] + b * HIGH * TILE + t + j);
  }
}

/* Values by pairs. Beyond the last token, its copies, which have no weight. */
static void pairs_of(const Field *v, int64_t row, const Tokens *tokens, const Tokens *soon, int64_t dim, uint16_t *to) {
  const int last = tokens->count - 1;
  for (int t = 0; t < TILE; t += 2, to += 32) {
    const char *a = vector(v, row, tokens->token[t < last ? t : last]);
    const char *b = vector(v, row, tokens->token[t + 1 < last ? t + 1 : last]);
    for (int64_t d = 0; d < dim; d += 32) {
      ask(v, row, soon, t, t + 2, 2 * d);
      const Line one = _mm512_loadu_si512(a + 2 * d), other = _mm512_loadu_si512(b + 2 * d);
      _mm512_store_si512(to + d * TILE, _mm512_unpacklo_epi16(one, other));
      _mm512_store_si512(to + d * TILE + 512, _mm512_unpackhi_epi16(one, other));
    }
  }
}

/* out[n] += sum_t p[n][t] value[t] of two batches. */
void dense_weigh(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
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

/* The result in the order of the channels; what was kept is given back. */
void dense_close(Dense *x, float *out) {
  for (int64_t i = 0; i < x->rows * x->dim_v; i += 32)
    for (int c = 0; c < 32; c++) out[i + c] = x->out[i + c % 8 / 4 * 16 + c / 8 * 4 + c % 4];
  _tile_release();
  free(x->queries);
}
#else
int dense_fit(const Field *k, const Field *v, int64_t dim, int64_t dim_v, int64_t rows) {
  return (void)k, (void)v, (void)dim, (void)dim_v, (void)rows, 0;
}
int dense_open(const float *q, int64_t rows, int64_t dim, int64_t dim_v, Dense *x) {
  return (void)q, (void)rows, (void)dim, (void)dim_v, (void)x, 0;
}
void dense_dots(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
                float *const *scores) {
  (void)k, (void)row, (void)tokens, (void)soon, (void)x, (void)scores;
}
void dense_weigh(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
                 Dense *x) {
  (void)v, (void)row, (void)p, (void)tokens, (void)soon, (void)x;
}
void dense_close(Dense *x, float *out) { (void)x, (void)out; }
#endif
