/* What those who take a prompt's queries by the block share: EIGHT query rows against TILE tokens at a time. */
#ifndef KVENGINE_PROMPT_H
#define KVENGINE_PROMPT_H

#include "simd.h"

#define TILE 64
#define EIGHT 8
#define BESIDE (LANES == 8 ? 4 : 8) /* rows of WIDE registers of columns that there are sums for */
#define WIDE (LANES == 8 ? 3 : 2)
#define PIECE (2 * LANES)

/* LANES numbers from the i-th on, as floats; `dtype` as in call.py. */
INLINE vf widened(const void *p, int64_t i, int dtype) {
  const uint16_t *half = (const uint16_t *)p + i;
  return dtype == 0 ? load((const float *)p + i) : dtype == 1 ? from_bf16(half) : from_f16(half);
}

INLINE float value_at(const void *p, int64_t i, int dtype) {
  const uint16_t *half = (const uint16_t *)p + i;
  return dtype == 0 ? ((const float *)p)[i] : dtype == 1 ? bf16_value(*half) : f16_value(*half);
}

/* From memory to every lane; the compiler makes a slower thing of splat(*p). */
#if LANES == 16
INLINE vf every(const float *p) { return (vf){*p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p, *p}; }
#elif LANES == 8
INLINE vf every(const float *p) { return (vf){*p, *p, *p, *p, *p, *p, *p, *p}; }
#else
INLINE vf every(const float *p) { return (vf){*p, *p, *p, *p}; }
#endif

/* c[i][j] = sum over d of a[i * a_row + d * a_step] b[d][j], for EIGHT rows and `wide` registers of columns; added to c if
   `more`. */
INLINE void product(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, int64_t n, float *c,
                    int64_t c_row, int wide, int more) {
  for (int row = 0; row < EIGHT; row += BESIDE, a += BESIDE * a_row, c += BESIDE * c_row) {
    vf s[BESIDE][WIDE];
#pragma GCC unroll 8
    for (int i = 0; i < BESIDE; i++)
      for (int j = 0; j < wide; j++) s[i][j] = more ? load(c + i * c_row + j * LANES) : (vf){0};
    for (int64_t d = 0; d < n; d++) {
      vf x[WIDE];
#pragma GCC unroll 3
      for (int j = 0; j < wide; j++) {
        x[j] = load(b + d * b_step + j * LANES);
        KEEP(x[j]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < BESIDE; i++) {
        const vf z = every(a + d * a_step + i * a_row);
#pragma GCC unroll 3
        for (int j = 0; j < wide; j++) s[i][j] += z * x[j];
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < BESIDE; i++)
      for (int j = 0; j < wide; j++) store(c + i * c_row + j * LANES, s[i][j]);
  }
}

/* The same for all `columns`, a multiple of LANES. */
INLINE void products(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, int64_t n, float *c,
                     int64_t c_row, int64_t columns, int more) {
  int64_t j = 0;
  for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
    product(a, a_row, a_step, b + j, b_step, n, c + j, c_row, WIDE, more);
  if (WIDE > 2 && j + 2 * LANES <= columns) {
    product(a, a_row, a_step, b + j, b_step, n, c + j, c_row, 2, more);
    j += 2 * LANES;
  }
  if (j < columns) product(a, a_row, a_step, b + j, b_step, n, c + j, c_row, 1, more);
}

/* Products of bfloat16 are exact, their sums float32. What stands on its side is pairs of channels, or of tokens, which lie
   together: words as wide as a float. `pair`: numbers of one row, the same for all lanes. */
#if HALVES
INLINE __m512bh pair(const uint16_t *p) {
  int32_t both;
  memcpy(&both, p, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

/* c[i][j] = sum over d of a[i * dim + d] b[d / 2][j].d: `rows`, a multiple of 4, of a against TILE columns. */
INLINE void pairs_product(const uint16_t *a, int rows, const float *b, int64_t dim, float *c) {
  for (int i = 0; i < rows; i += 4, a += 4 * dim, c += 4 * TILE) {
    __m512 s[4][4];
    for (int j = 0; j < 16; j++) s[j / 4][j % 4] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 2) {
      __m512bh x[4];
      for (int j = 0; j < 4; j++) x[j] = (__m512bh)_mm512_loadu_si512(b + d / 2 * TILE + j * LANES);
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        const __m512bh z = pair(a + n * dim + d);
        for (int j = 0; j < 4; j++) s[n][j] = _mm512_dpbf16_ps(s[n][j], x[j], z);
      }
    }
    for (int j = 0; j < 16; j++) _mm512_storeu_ps(c + j / 4 * TILE + j % 4 * LANES, s[j / 4][j % 4]);
  }
}

/* c[i][j] += sum over t of a[i][t] b[t / 2][j].t: EIGHT rows of TILE rounded weights against PIECE columns. */
INLINE void add_pairs(const uint16_t *a, const float *b, int64_t b_step, int64_t n, float *c, int64_t c_row) {
  __m512 s[EIGHT][2];
#pragma GCC unroll 8
  for (int i = 0; i < EIGHT; i++)
    for (int j = 0; j < 2; j++) s[i][j] = _mm512_loadu_ps(c + i * c_row + j * LANES);
  for (int64_t t = 0; t < n; t += 2, b += b_step) {
    const __m512bh x = (__m512bh)_mm512_loadu_si512(b), y = (__m512bh)_mm512_loadu_si512(b + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < EIGHT; i++) {
      const __m512bh z = pair(a + i * TILE + t);
      s[i][0] = _mm512_dpbf16_ps(s[i][0], x, z);
      s[i][1] = _mm512_dpbf16_ps(s[i][1], y, z);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < EIGHT; i++)
    for (int j = 0; j < 2; j++) _mm512_storeu_ps(c + i * c_row + j * LANES, s[i][j]);
}

/* EIGHT rows of TILE weights, rounded. */
INLINE void round_weights(const float *s, uint16_t *to) {
  for (int i = 0; i < EIGHT * TILE; i += 2 * LANES)
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(s + i + LANES), _mm512_loadu_ps(s + i)));
}

/* to[t / 2][d].t: the values of TILE tokens by pairs; zero from `n` on and where there is a gap. */
INLINE void pair_values(const uint16_t *from, int64_t stride, int64_t n, const int32_t *gap, int64_t dim, float *to) {
  uint16_t order[2][32];
  for (int i = 0; i < 32; i++)
    for (int j = 0; j < 2; j++) order[j][i] = (uint16_t)(j * 16 + i / 2 + i % 2 * 32);
  const __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
  for (int64_t t = 0; t < n; t += 2, to += dim)
    for (int64_t d = 0; d < dim; d += 32) {
      __m512i x[2];
      for (int i = 0; i < 2; i++)
        x[i] = t + i < n && !(gap && gap[t + i]) ? _mm512_loadu_si512(from + (t + i) * stride + d) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(x[0], low, x[1]));
      _mm512_storeu_si512(to + d + LANES, _mm512_permutex2var_epi16(x[0], high, x[1]));
    }
}

INLINE void store_halves(uint16_t *to, vf x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
INLINE void pairs_product(const uint16_t *a, int rows, const float *b, int64_t dim, float *c) {
  (void)a, (void)rows, (void)b, (void)dim, (void)c;
}
INLINE void add_pairs(const uint16_t *a, const float *b, int64_t b_step, int64_t n, float *c, int64_t c_row) {
  (void)a, (void)b, (void)b_step, (void)n, (void)c, (void)c_row;
}
INLINE void round_weights(const float *s, uint16_t *to) { (void)s, (void)to; }
INLINE void pair_values(const uint16_t *from, int64_t stride, int64_t n, const int32_t *gap, int64_t dim, float *to) {
  (void)from, (void)stride, (void)n, (void)gap, (void)dim, (void)to;
}
/* To the nearest, ties to even. */
INLINE void store_halves(uint16_t *to, vf x) {
  const vu bits = (vu)x;
  const vu near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *(vh *)to = __builtin_convertvector((vu)choose(x == x, (vf)near, (vf)((vu){0} + 0x7fc0)), vh);
}
#endif

/* Two rows that are `n` apart among LANES change pieces of `n` lanes: a step of a transposition. */
#define SWAP(n, from, to)                                                       \
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & n)) {      \
    to[i] = EVEN_##n(from[i], from[i + n]);                                     \
    to[i + n] = ODD_##n(from[i], from[i + n]);                                  \
  }

/* to[j][i] = from[start + i * from_row + j], LANES by LANES. */
INLINE void transpose(const void *from, int64_t start, int64_t from_row, int dtype, float *to, int64_t to_row) {
  vf a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) a[i] = widened(from, start + i * from_row, dtype);
  SWAP(1, a, b)
  SWAP(2, b, a)
#if LANES >= 8
  SWAP(4, a, b)
#endif
#if LANES == 16
  SWAP(8, b, a)
#endif
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) store(to + i * to_row, LANES == 8 ? b[i] : a[i]);
}

/* The keys of `n` tokens on their side, key[channel][token], zero where there is no token. */
INLINE void lay(const void *from, int64_t start, int64_t stride, int dtype, int64_t n, int64_t dim, float *key) {
  const int64_t full = n / LANES * LANES;
  for (int64_t d = 0; d < dim; d += LANES)
    for (int64_t t = 0; t < full; t += LANES)
      transpose(from, start + t * stride + d, stride, dtype, key + d * TILE + t, TILE);
  for (int64_t d = 0; d < dim; d++)
    for (int64_t t = full; t < TILE; t++) key[d * TILE + t] = t < n ? value_at(from, start + t * stride + d, dtype) : 0;
}

/* Which of `n` tokens are none; how many of those there are. */
static int64_t gaps(const int32_t *position, int64_t n, int32_t *gap) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; j++) count -= gap[j] = -(position[j] < 0);
  for (int64_t j = n; j < TILE; j++) gap[j] = 0;
  return count;
}

INLINE void hide(float *s, int64_t from, int64_t to) {
  for (int64_t j = from < 0 ? 0 : from; j < to; j++) s[j] = -INFINITY;
}

INLINE void cap(float *s, int64_t columns, float softcap) {
  for (int64_t j = 0; j < columns; j += LANES) store(s + j, capped(load(s + j), softcap));
}

/* One row's scores become weights in place; `top` and `total` (by lane) follow the online softmax, `out` is rescaled. */
INLINE void soften(float *s, int64_t columns, float *top, float *total, float *out, int64_t dim) {
  vf high = load(s);
  for (int64_t j = LANES; j < columns; j += LANES) high = larger(high, load(s + j));
  const float now = peak(high);
  if (now > *top) {
    const float shrink = expf(*top - now);
    store(total, load(total) * shrink);
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) * shrink);
    *top = now;
  }
  const vf shift = splat(*top == -INFINITY ? 0 : *top);
  vf all = load(total);
  for (int64_t j = 0; j < columns; j += LANES) {
    vf p = fading(load(s + j) - shift);
    all += p;
    store(s + j, p);
  }
  store(total, all);
}

#endif
