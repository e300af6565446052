/* Dense keys and values in bfloat16 by products of pairs (AVX512-BF16), for queries that were bfloat16 themselves.

   The queries are what they were, without their scale, so that products with keys are exact; weights are the sum of two
   bfloat16, their planes: 16 bits of the 24. In scores a lane is a query row, in results a channel:
     scores [token][row]   += key pair (one for all lanes) * pairs of 16 or 8 rows
     out    [row][channel] += weights of two tokens (one for all lanes) * values by pairs */
#include "dense_inner.h"

#if HALVES
#define HIGH 16 /* query rows of a block; the last may have 8 */
#define STEP 8  /* tokens whose scores are computed together */

static int open_pairs(const float *q, float scale, int64_t rows, int64_t dim, int64_t dim_v, Dense *x) {
  const int64_t blocks = (rows + HIGH - 1) / HIGH, half = dim / 2;
  const int64_t queries = blocks * half * 2 * HIGH, made = TILE * dim_v, weights = 2 * 4 * TILE;
  x->queries = aligned_alloc(64, sizeof(uint16_t) * (queries + made + weights) + sizeof(float) * rows * dim_v + 64);
  if (!x->queries) return 0;
  *x = (Dense){.rows = rows, .blocks = blocks, .dim = dim, .dim_v = dim_v, .scale = scale, .queries = x->queries,
               .made = x->queries + queries, .weights = x->queries + queries + made};
  x->out = (float *)(x->weights + weights);
  memset(x->out, 0, sizeof(float) * rows * dim_v);
  memset(x->queries, 0, sizeof(uint16_t) * queries);
  const vf by = splat(1 / scale);
  for (int64_t n = 0; n < rows; n += 4)
    for (int64_t d = 0; d < dim; d += 32) {
      __m512 pair[4];
      uint32_t *to = (uint32_t *)x->queries + (n / HIGH * half + d / 2) * HIGH + n % HIGH;
      for (int i = 0; i < 4; i++) {
        const vf a = load(q + (n + i) * dim + d) * by, b = load(q + (n + i) * dim + d + LANES) * by;
        pair[i] = (__m512)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      }
      turn(pair, pair);
      for (int i = 0; i < 4; i++) {
        _mm_store_ps((float *)(to + i * HIGH), _mm512_castps512_ps128(pair[i]));
        _mm_store_ps((float *)(to + (4 + i) * HIGH), _mm512_extractf32x4_ps(pair[i], 1));
        _mm_store_ps((float *)(to + (8 + i) * HIGH), _mm512_extractf32x4_ps(pair[i], 2));
        _mm_store_ps((float *)(to + (12 + i) * HIGH), _mm512_extractf32x4_ps(pair[i], 3));
      }
    }
  return 1;
}

/* Of STEP keys and up to 16 rows; up to 8 take half a register. */
INLINE void products(const uint32_t *q, int64_t half, const char *const *at, int few, __m512 *s) {
  if (few) {
    __m256 y[STEP];
    for (int i = 0; i < STEP; i++) y[i] = _mm256_setzero_ps();
    for (int64_t d = 0; d < half; d++) {
      const __m256bh rows = (__m256bh)_mm256_loadu_si256((const __m256i *)(q + d * HIGH));
#pragma GCC unroll 8
      for (int i = 0; i < STEP; i++)
        y[i] = _mm256_dpbf16_ps(y[i], rows, (__m256bh)_mm256_set1_epi32(((const int *)at[i])[d]));
    }
    for (int i = 0; i < STEP; i++) s[i] = _mm512_castps256_ps512(y[i]);
    return;
  }
  __m512 y[STEP];
  for (int i = 0; i < STEP; i++) y[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < half; d++) {
    const __m512bh rows = (__m512bh)_mm512_loadu_si512(q + d * HIGH);
#pragma GCC unroll 8
    for (int i = 0; i < STEP; i++)
      y[i] = _mm512_dpbf16_ps(y[i], rows, (__m512bh)_mm512_set1_epi32(((const int *)at[i])[d]));
  }
  for (int i = 0; i < STEP; i++) s[i] = y[i];
}

/* scores[n][t] = q[n] . key[t] of two batches. `soon`: the next ones. */
static void dots(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
                 float *const *scores) {
  const int64_t half = x->dim / 2;
  for (int i = 0; i < PAIR; i++)
    for (int t = 0; t < tokens[i]->count; t += STEP) {
      const char *at[STEP];
      for (int j = 0; j < STEP; j++)
        at[j] = vector(k, row, tokens[i]->token[t + j < tokens[i]->count ? t + j : tokens[i]->count - 1]);
      for (int64_t byte = 0; byte < 2 * x->dim; byte += 64) ask(k, row, soon[i], t, t + STEP, byte);
      for (int64_t n = 0; n < x->rows; n += HIGH) {
        __m512 s[STEP];
        const uint32_t *q = (const uint32_t *)x->queries + n * half;
        products(q, half, at, x->rows - n <= 8, s);
        for (int j = 0; j < STEP; j++) s[j] = _mm512_mul_ps(s[j], _mm512_set1_ps(x->scale));
        for (int j = 0; j < STEP; j += 4) put(s + j, x->rows - n, scores[i] + n * TILE + t + j);
      }
    }
}

/* out += weights [plane][4 rows][pair] * values by pairs: `wide` registers of 16 channels, for 4 rows */
INLINE void sums_of(const uint32_t *weights, const uint16_t *made, int64_t dim, int pairs, int wide, float *out) {
  __m512 s[4][4];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < wide; j++) s[i][j] = (__m512)load(out + i * dim + j * LANES);
  for (int t = 0; t < pairs; t++) {
    __m512bh value[4];
    for (int j = 0; j < wide; j++) value[j] = (__m512bh)_mm512_load_si512(made + j * 512 + t * 32);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[i * (TILE / 2) + t]);
      for (int j = 0; j < wide; j++) s[i % 4][j] = _mm512_dpbf16_ps(s[i % 4][j], value[j], weight);
    }
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < wide; j++) store(out + i * dim + j * LANES, (vf)s[i][j]);
}

/* out[n] += sum_t p[n][t] value[t] of two batches. */
static void weigh(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
                  Dense *x) {
  const int64_t dim = x->dim_v;
  for (int i = 0; i < PAIR && tokens[i]->count; i++) {
    const int pairs = (tokens[i]->count + 1) / 2;
    pairs_of(v, row, tokens[i], soon[i], dim, x->made);
    for (int64_t n = 0; n < x->rows; n += 4) {
      for (int j = 0; j < 4; j++) {
        const float *from = p[i] + (n + j) * TILE;
        __m512i first, second;
        planes_of((__m512)load(from), (__m512)load(from + LANES), &first, &second);
        _mm512_store_si512(x->weights + j * TILE, first);
        _mm512_store_si512(x->weights + (4 + j) * TILE, second);
      }
      const uint32_t *weights = (const uint32_t *)x->weights;
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64) sums_of(weights, x->made + d * TILE, dim, pairs, 4, x->out + n * dim + d);
      if (d < dim) sums_of(weights, x->made + d * TILE, dim, pairs, 2, x->out + n * dim + d);
    }
  }
}

static void close_pairs(Dense *x, float *out) {
  unsort_pairs(x, out);
  free(x->queries);
}

const Way *dense_by_pairs(void) {
  static const Way way = {open_pairs, dots, weigh, close_pairs};
  return &way;
}
#else
const Way *dense_by_pairs(void) { return NULL; }
#endif
