/* Keys and values of 8 bits, for queries that were bfloat16: codes are whole numbers of 16 bits, and so are the factors.

   A code of 8 bits under the exponent of 1 is none of bfloat16's numbers. So x = scale * query, or scale * weight, is
   rounded to whole numbers of a unit instead, which is such that the largest of a row's (of a row's and a group's channels,
   for values) is 32767; sums stay below 2^31 for 256 channels. Codes lie as in pairs.c, two to a half word. Nibbles that
   refine nibbles make bytes with these first, of the even ones and of the odd ones; their channels are those of 4 bits, four
   to a half word. */
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

/* The bytes of even nibbles and of odd ones with what refines them. */
INLINE void joined(Words code, Words fine, Words byte[2]) {
  const Words upper = _mm512_set1_epi8((char)0xf0);
  byte[0] = _mm512_ternarylogic_epi32(upper, _mm512_slli_epi32(code, 4), fine, 0xca); /* upper ? code : fine */
  byte[1] = _mm512_ternarylogic_epi32(upper, code, _mm512_srli_epi32(fine, 4), 0xca);
}

/* Where what refines the codes is. */
INLINE void fine_of(const Field *f, const uint8_t *const *at, int count, const uint8_t **fine) {
  for (int i = 0; i < count; i++) fine[i] = (const uint8_t *)f->low + (at[i] - (const uint8_t *)f->data);
}

INLINE vf magnitude(vf x) { return (vf)_mm512_abs_ps((__m512)x); }

/* The largest becomes 32767, or nothing is there. */
INLINE float unit_of(vf largest) { return fmaxf(peak(largest), 1e-30f) / 32767; }

/* The queries times the scales of a key group. */
void take_bytes(const Field *k, int64_t rows, int64_t group, Queries *x) {
  const int64_t dim = k->dim;
  float scale[256], zero[256], by[256];
  for (int64_t d = 0; d < dim; d += PAIRED) { /* by pairs, from here on */
    vf s[2], z[2];
    in_order(k->scale, group * dim + d, k->dtype, x->order, s);
    in_order(k->zero, group * dim + d, k->dtype, x->order, z);
    for (int j = 0; j < 2; j++) {
      store(scale + d + j * LANES, s[j] * byte_step(k));
      store(zero + d + j * LANES, z[j] - s[j] * byte_step(k) * byte_zero(k));
    }
  }
  for (int64_t n = 0; n < rows; n++) {
    vf exact = {0}, largest = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
      const vf q = load(x->q + n * dim + d), y = q * load(scale + d);
      exact += q * load(zero + d);
      largest = larger(largest, magnitude(y));
      store(by + d, y);
    }
    x->add[n] = sum(exact);
    x->unit[n] = unit_of(largest);
    const float many = 1 / x->unit[n];
    for (int64_t d = 0; d < dim; d += PAIRED)
      _mm512_store_si512(x->part + (n * dim + d) / 2, whole_numbers(load(by + d) * many, load(by + d + LANES) * many));
  }
}

/* For `blocks` times 16 tokens; one block has two sums of each score, as in pairs.c. */
INLINE void products_as(const Queries *x, int64_t rows, int64_t dim, const uint8_t *const *at, const uint8_t *const *fine_at,
                        float *scores, int blocks, int fine) {
  const int64_t half = dim / 2, bytes = fine ? half : dim;
  for (int64_t n = 0; n < rows; n += 4) {
    Words s[2][4];
    for (int i = 0; i < 8; i++) s[i / 4][i % 4] = _mm512_setzero_si512();
    const uint32_t *q = x->part + n * half;
    for (int64_t from = 0; from < bytes; from += 16) {
      Words words[2][4], rest[2][4];
      for (int b = 0; b < blocks; b++) {
        turn_round(at + 16 * b, from, words[b]);
        if (fine) turn_round(fine_at + 16 * b, from, rest[b]);
      }
#pragma GCC unroll 4
      for (int w = 0; w < 4; w++) {
        Words byte[2][2];
        for (int b = 0; b < blocks; b++)
          if (fine) joined(words[b][w], rest[b][w], byte[b]);
#pragma GCC unroll 4
        for (int j = 0; j < (fine ? 4 : 2); j++, q++) {
          Words code[2];
          for (int b = 0; b < blocks; b++) code[b] = fine ? codes_in(byte[b][j % 2], j / 2) : codes_in(words[b][w], j);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const Words a = _mm512_set1_epi32((int)q[i * half]);
            if (blocks == 1) s[j % 2][i] = _mm512_dpwssd_epi32(s[j % 2][i], code[0], a);
            else
              for (int b = 0; b < 2; b++) s[b][i] = _mm512_dpwssd_epi32(s[b][i], code[b], a);
          }
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

void byte_products(const Field *k, const Queries *x, int64_t rows, const uint8_t *const *at, int wide, float *scores) {
  const uint8_t *fine[TILE];
  if (k->low) {
    fine_of(k, at, wide ? TILE : LANES, fine);
    if (wide) products_as(x, rows, k->dim, at, fine, scores, 2, 1);
    else products_as(x, rows, k->dim, at, fine, scores, 1, 1);
  } else if (wide) products_as(x, rows, k->dim, at, at, scores, 2, 0);
  else products_as(x, rows, k->dim, at, at, scores, 1, 0);
}

/* Weights of four rows times scales. Each group of channels has a unit of its own: beside that of an outlying channel, little
   would be left of the others. */
INLINE void weigh_bytes_as(const Pairs *known, Weights *x, const float *p, int groups) {
  const Words order = _mm512_loadu_si512(known->two), turn = _mm512_loadu_si512(known->turn);
  const int each = LANES / groups;
  const vi lane = EACH_LANE, group = lane / each;
  for (int i = 0; i < 4; i++) {
    vf exact = {0}, largest = {0};
    float by[TILE * LANES];
    for (int t = 0; t < TILE; t += each) {
      const vf weight = repeated(p + i * TILE + t, each), y = load(x->scale + t * groups) * weight;
      exact += load(x->zero + t * groups) * weight;
      largest = larger(largest, magnitude(y));
      store(by + t * groups, y);
    }
    const vf most = largest_of_groups((vf)_mm512_permutexvar_ps(turn, (__m512)largest), groups);
    x->unit[i] = larger(most, splat(1e-30f)) / 32767;
    x->add[i] = sum_of_groups((vf)_mm512_permutexvar_ps(turn, (__m512)exact), groups);
    const vf many = 1 / (vf)_mm512_permutexvar_ps((Words)group, (__m512)x->unit[i]);
    for (int d = 0; d < TILE * groups; d += PAIRED)
      _mm512_store_si512(x->weight[i] + d / 2,
                         _mm512_permutexvar_epi16(order, whole_numbers(load(by + d) * many, load(by + d + LANES) * many)));
  }
}

static void weigh_bytes(const Pairs *known, Weights *x, const float *p, int64_t groups) {
  switch (groups) { /* a constant, so that each loop is specialised */
    case 1: weigh_bytes_as(known, x, p, 1); break;
    case 2: weigh_bytes_as(known, x, p, 2); break;
    case 4: weigh_bytes_as(known, x, p, 4); break;
    case 8: weigh_bytes_as(known, x, p, 8); break;
    default: weigh_bytes_as(known, x, p, 16);
  }
}

/* `known->group`: of 8 bits, a line has two registers of half words, and groups are of 16 channels at least. */
INLINE void sums_as(const Pairs *known, Weights *x, const uint8_t *const *fine_at, int64_t dim, int64_t groups, const float *p,
                    int64_t rows, int count, float *out, int fine, int whole) {
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE, out += 4 * dim) {
    weigh_bytes(known, x, p, groups);
    for (int64_t line = 0; line < dim / 64; line++) {
      const Words of = _mm512_loadu_si512(known->group[fine ? line : 2 * line]);
      float *to = out + line * 64;
      Words s[4][4];
      for (int i = 0; i < 16; i++) s[i / 4][i % 4] = _mm512_setzero_si512();
      for (int t = 0; t < count; t += 2) {
        Words half[2], w[4];
        if (fine)
          joined(side_by_side(x->at[t], x->at[t + 1], line, whole),
                 side_by_side(fine_at[t], fine_at[t + 1], line, whole), half);
        else
          for (int i = 0; i < 2; i++) half[i] = side_by_side(x->at[t], x->at[t + 1], 2 * line + i, 1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) w[i] = _mm512_permutexvar_epi32(of, _mm512_loadu_si512(x->weight[i] + t / 2 * groups));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const Words code = fine ? codes_in(half[j % 2], j / 2) : codes_in(half[j / 2], j % 2);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) s[i][j] = _mm512_dpwssd_epi32(s[i][j], code, w[i]);
        }
      }
      for (int i = 0; i < 4; i++) {
        const vf add = (vf)_mm512_permutexvar_ps(of, (__m512)x->add[i]);
        const vf unit = (vf)_mm512_permutexvar_ps(of, (__m512)x->unit[i]);
        for (int j = 0; j < 4; j++) {
          float *here = to + i * dim + j * LANES;
          store(here, load(here) + ((vf)_mm512_cvtepi32_ps(s[i][j]) * unit + add));
        }
      }
    }
  }
}

/* out[n] += sum_t p[n][t] value[t] of the first `count` tokens; the scales of the others are 0 */
void byte_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out) {
  const uint8_t *fine[TILE];
  if (count % 2) x->at[count] = x->at[count - 1];
  if (v->low) fine_of(v, x->at, count + count % 2, fine);
  if (!v->low) sums_as(known, x, x->at, v->dim, groups, p, rows, count, out, 0, 1);
  else if (lines_are_whole(v)) sums_as(known, x, fine, v->dim, groups, p, rows, count, out, 1, 1);
  else sums_as(known, x, fine, v->dim, groups, p, rows, count, out, 1, 0);
}
#endif
