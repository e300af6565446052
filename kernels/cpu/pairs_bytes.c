/* Keys and values of 8 bits, for queries that were bfloat16: codes are whole numbers of 16 bits, and so are the factors.

   A code of 8 bits under the exponent of 1 is none of bfloat16's numbers. So x = scale * query, or scale * weight, is
   rounded to whole numbers of a unit instead, which is such that the largest of a row's is 32767; sums stay below 2^31
   for 256 channels. Codes lie as in pairs.c, two to a half word. */
#include "pairs_inner.h"

#if BYTES
/* Two registers, as whole numbers of 16 bits: those of the first, then those of the second. */
INLINE Words whole_numbers(vf first, vf second) {
  const __m256i a = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)first));
  const __m256i b = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)second));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

/* The codes of one field of every half word */
INLINE Words codes_in(Words words, int field) {
  return _mm512_and_si512(field ? _mm512_srli_epi32(words, 8) : words, _mm512_set1_epi16(255));
}

INLINE vf magnitude(vf x) { return (vf)_mm512_abs_ps((__m512)x); }

/* The largest becomes 32767, or nothing is there. */
INLINE float unit_of(vf largest) { return fmaxf(peak(largest), 1e-30f) / 32767; }

/* The queries times the scales of a key group. */
void take_bytes(const Field *k, int64_t rows, int64_t group, Queries *x) {
  const int64_t dim = k->dim, half = dim / 2;
  const Words even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0), odd = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
  float scale[256], zero[256], by[256];
  uint16_t places[32];
  for (int i = 0; i < 32; i++) places[i] = (uint16_t)(i / 2 + i % 2 * 16);
  const Words order = _mm512_loadu_si512(places);
  widen_run(k->scale, group * dim, dim, k->dtype, scale);
  widen_run(k->zero, group * dim, dim, k->dtype, zero);
  for (int64_t n = 0; n < rows; n++) {
    vf exact = {0}, largest = {0};
    for (int64_t i = 0; i < half; i += LANES) {
      const __m512d s = (__m512d)load(scale + 2 * i), t = (__m512d)load(scale + 2 * i + LANES);
      const __m512d y = (__m512d)load(zero + 2 * i), z = (__m512d)load(zero + 2 * i + LANES);
      const vf q0 = load(x->even + n * half + i), q1 = load(x->odd + n * half + i);
      const vf x0 = q0 * (vf)_mm512_permutex2var_pd(s, even, t), x1 = q1 * (vf)_mm512_permutex2var_pd(s, odd, t);
      exact += q0 * (vf)_mm512_permutex2var_pd(y, even, z) + q1 * (vf)_mm512_permutex2var_pd(y, odd, z);
      largest = larger(largest, larger(magnitude(x0), magnitude(x1)));
      store(by + 2 * i, x0);
      store(by + 2 * i + LANES, x1);
    }
    x->add[n] = sum(exact);
    x->unit[n] = unit_of(largest);
    const float many = 1 / x->unit[n];
    for (int64_t i = 0; i < half; i += LANES)
      _mm512_store_si512(x->part + n * half + i,
                         _mm512_permutexvar_epi16(order, whole_numbers(load(by + 2 * i) * many, load(by + 2 * i + LANES) * many)));
  }
}

/* For `blocks` times 16 tokens; one block has two sums of each score, as in pairs.c. */
INLINE void products_as(const Queries *x, int64_t rows, int64_t dim, const uint8_t *const *at, float *scores, int blocks) {
  const int64_t half = dim / 2;
  for (int64_t n = 0; n < rows; n += 4) {
    Words s[2][4];
    for (int i = 0; i < 8; i++) s[i / 4][i % 4] = _mm512_setzero_si512();
    const uint32_t *q = x->part + n * half;
    for (int64_t from = 0; from < dim; from += 16) {
      Words words[2][4];
      for (int b = 0; b < blocks; b++) turn_round(at + 16 * b, from, words[b]);
#pragma GCC unroll 4
      for (int w = 0; w < 4; w++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++, q++) {
          Words code[2];
          for (int b = 0; b < blocks; b++) code[b] = codes_in(words[b][w], j);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const Words a = _mm512_set1_epi32((int)q[i * half]);
            if (blocks == 1) s[j][i] = _mm512_dpwssd_epi32(s[j][i], code[0], a);
            else
              for (int b = 0; b < 2; b++) s[b][i] = _mm512_dpwssd_epi32(s[b][i], code[b], a);
          }
        }
    }
    for (int i = 0; i < 4; i++) {
      const vf add = splat(x->add[n + i]), unit = splat(x->unit[n + i]);
      float *to = scores + (n + i) * TILE;
      if (blocks == 1) s[0][i] = _mm512_add_epi32(s[0][i], s[1][i]);
      for (int b = 0; b < blocks; b++) store(to + b * LANES, (vf)_mm512_cvtepi32_ps(s[b][i]) * unit + add);
    }
  }
}

void byte_products(const Queries *x, int64_t rows, int64_t dim, const uint8_t *const *at, int wide, float *scores) {
  if (wide) products_as(x, rows, dim, at, scores, 2);
  else products_as(x, rows, dim, at, scores, 1);
}

/* Weights of four rows times scales. */
static void weigh_bytes(const Pairs *known, Weights *x, const float *p, int64_t groups) {
  const Words order = _mm512_loadu_si512(known->two), each = _mm512_set1_epi32(known->token[LANES - 1] + 1);
  for (int i = 0; i < 4; i++) {
    const __m512 a = (__m512)load(p + i * TILE), b = (__m512)load(p + i * TILE + LANES);
    Words which = _mm512_loadu_si512(known->token);
    vf exact = {0}, largest = {0};
    float by[TILE * LANES];
    for (int64_t d = 0; d < TILE * groups; d += LANES, which = _mm512_add_epi32(which, each)) {
      const vf weight = (vf)_mm512_permutex2var_ps(a, which, b), y = load(x->scale + d) * weight;
      exact += load(x->zero + d) * weight;
      largest = larger(largest, magnitude(y));
      store(by + d, y);
    }
    x->unit[i] = unit_of(largest);
    x->add[i] = over_groups(exact, groups);
    const float many = 1 / x->unit[i];
    for (int64_t d = 0; d < TILE * groups; d += 2 * LANES)
      _mm512_storeu_si512(x->weight[i] + d / 2,
                          _mm512_permutexvar_epi16(order, whole_numbers(load(by + d) * many, load(by + d + LANES) * many)));
  }
}

/* out[n] += sum_t p[n][t] value[t] of the first `count` tokens; the scales of the others are 0 */
void byte_sums(const Pairs *known, Weights *x, int64_t dim, int64_t groups, const float *p, int64_t rows, int count,
               float *out) {
  if (count % 2) x->at[count] = x->at[count - 1];
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE, out += 4 * dim) {
    weigh_bytes(known, x, p, groups);
    for (int64_t line = 0; line < dim / 64; line++) {
      const Words of = _mm512_loadu_si512(known->group[2 * line]); /* and of the register behind it: groups are of 16 at least */
      float *to = out + line * 64;
      Words s[4][4];
      for (int i = 0; i < 16; i++) s[i / 4][i % 4] = _mm512_setzero_si512();
      for (int t = 0; t < count; t += 2) {
        const Words a = _mm512_loadu_si512(x->at[t] + line * 64), b = _mm512_loadu_si512(x->at[t + 1] + line * 64);
        const Words half[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
        Words w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) w[i] = _mm512_permutexvar_epi32(of, _mm512_loadu_si512(x->weight[i] + t / 2 * groups));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const Words code = codes_in(half[j / 2], j % 2);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) s[i][j] = _mm512_dpwssd_epi32(s[i][j], code, w[i]);
        }
      }
      for (int i = 0; i < 4; i++) {
        const vf add = (vf)_mm512_permutexvar_ps(of, (__m512)x->add[i]), unit = splat(x->unit[i]);
        for (int j = 0; j < 4; j++) {
          float *here = to + i * dim + j * LANES;
          store(here, load(here) + ((vf)_mm512_cvtepi32_ps(s[i][j]) * unit + add));
        }
      }
    }
  }
}
#endif
