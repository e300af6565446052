/* TurboQuant's codes (turned.c) by whole numbers of 16 bits, for queries that were bfloat16 and with AVX2 alone (whole.c).

   A level is a whole number too, of which two tables of 16 bytes hold the lower and the upper half: two shuffles find those
   of 32 codes. Neither turned queries nor levels have outliers, so 12 bits of each are more than bfloat16 has, and their
   products can be added without going beyond 2^31. What is left above a code's bits does no harm, as levels repeat up to 16.
     keys    a pair is a field of two bytes that follow each other
     values  bytes of two tokens stand side by side, and a pair is a channel of both */
#include "turned.h"
#include "whole_inner.h"

#if WHOLE
#define LEVEL 4095 /* the largest level */

INLINE int lower(int bits) { return bits == 3 ? 2 : bits; } /* bits that lie side by side: of 3, the upper ones lie behind */

int whole_turned_lie(const Field *f) { return f->layout == TURNED && f->bits > 1 && f->dim * lower((int)f->bits) % 256 == 0; }

static void open_levels(const Field *f, LevelBytes *x) {
  const float *level = f->zero;
  float most = 1e-30f;
  for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(level[i]));
  x->unit = most / LEVEL;
  for (int i = 0; i < 16; i++) {
    const int number = (int)lrintf(level[i] / x->unit);
    x->low[i] = (uint8_t)(number & 255);
    x->high[i] = (uint8_t)(number >> 8 & 255);
  }
}

/* `q`: turned */
void whole_turned_keys(const Field *k, const float *q, int64_t rows, Turned *x) {
  const int64_t dim = k->dim, fields = 8 / lower((int)k->bits);
  const float largest = (float)((1 << 19) / dim - 1); /* so that LEVEL times it, `dim` times, is below 2^31 */
  open_levels(k, &x->k_levels);
  for (int64_t n = 0; n < rows; n++, q += dim) {
    float most = 1e-30f, none = 0; /* the latter NaN if a number is not finite, of which whole ones say nothing */
    for (int64_t i = 0; i < dim; i++) most = fmaxf(most, fabsf(q[i])), none += q[i] * 0;
    const float unit = most / largest;
    x->unit[2 * n] = x->unit[2 * n + 1] = unit * x->k_levels.unit + none;
    for (int64_t i = 0; i < dim; i++) { /* [line, field, half, byte] */
      const int64_t lane = i % HALF, half = i / HALF % 2, field = i / 32 % fields, line = i / 32 / fields;
      const int64_t byte = line * 32 + lane / 8 * 16 + half * 8 + lane % 8;
      x->whole[n * dim + i] = (int16_t)lrintf(q[byte * fields + field] / unit);
    }
  }
}

void whole_turned_values(const Field *v, Turned *x) { open_levels(v, &x->v_levels); }

/* What is above two bits of 32 bytes' codes, bits 0 to 3 of a byte: those of two bytes are one byte. */
INLINE Words upper_of(const uint8_t *p) {
  const __m128i x = _mm_loadu_si128((const __m128i *)p), y = _mm_srli_epi16(x, 4);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(x, y)), _mm_unpackhi_epi8(x, y), 1);
}

/* The levels of one field of 32 bytes: of the first 8 of each half, and of the others. */
INLINE void levels_of(Words words, Words upper, int j, int bits, const LevelBytes *x, Words out[2]) {
  Words code = j ? _mm256_srli_epi16(words, lower(bits) * j) : words;
  if (bits == 3) {
    const Words third = j < 2 ? _mm256_slli_epi16(upper, 2 - j) : _mm256_srli_epi16(upper, j - 2);
    code = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi8(3)), _mm256_and_si256(third, _mm256_set1_epi8(4)));
  } else code = _mm256_and_si256(code, _mm256_set1_epi8(15));
  const Words low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i *)x->low), code);
  const Words high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i *)x->high), code);
  out[0] = _mm256_unpacklo_epi8(low, high);
  out[1] = _mm256_unpackhi_epi8(low, high);
}

/* Of two tokens, for four rows; `scale`: theirs */
INLINE void products_as(const Turned *x, int64_t n, int64_t dim, const uint8_t *const at[2], const float scale[2],
                        float *scores, int bits) {
  const int fields = 8 / lower(bits);
  const int16_t *q = x->whole + n * dim;
  const vf4 each = {scale[0], scale[1], scale[0], scale[1]};
  Words s[4][2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) s[i / 2][i % 2] = _mm256_setzero_si256();
  for (int64_t byte = 0; byte < dim / fields; byte += 32) {
    Words words[2], upper[2];
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) {
      words[t] = words_at(at[t] + byte);
      upper[t] = bits == 3 ? upper_of(at[t] + dim / 4 + byte / 2) : words[t];
    }
#pragma GCC unroll 4
    for (int j = 0; j < fields; j++) {
      Words first[2], second[2];
      levels_of(words[0], upper[0], j, bits, &x->k_levels, first);
      levels_of(words[1], upper[1], j, bits, &x->k_levels, second);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++, q += HALF)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Words a = words_at(q + i * dim);
          s[i][0] = added(s[i][0], first[half], a);
          s[i][1] = added(s[i][1], second[half], a);
        }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const vf4 unit = *(const vf4 *)(x->unit + 2 * (n + i)) * each;
    const vf4 score = (vf4)_mm_cvtepi32_ps(sums_of_two(s[i], s[i + 1])) * unit;
    float *to = scores + i * TILE;
    to[0] = score[0], to[1] = score[1], to[TILE] = score[2], to[TILE + 1] = score[3];
  }
}

/* scores[n][t] = q[n] . key[t] of a batch, up to an even number of tokens; `scale`: theirs */
void whole_turned_dots(const Field *k, int64_t rows, const uint8_t *const *at, const float *scale, int count, const Turned *x,
                       float *scores) {
  for (int t = 0; t < count; t += 2)
    for (int64_t n = 0; n < rows; n += 4) {
      float *to = scores + n * TILE + t;
      if (k->bits == 4) products_as(x, n, k->dim, at + t, scale + t, to, 4);
      else if (k->bits == 3) products_as(x, n, k->dim, at + t, scale + t, to, 3);
      else products_as(x, n, k->dim, at + t, scale + t, to, 2);
    }
}

/* One field of those bytes of a line that unpacking puts into the `part`th half, for four rows. */
INLINE void sums_as(const uint8_t *const *at, int64_t byte, int64_t dim, int count, const uint32_t *weight, const LevelBytes *x,
                    Words s[4][2], int j, int part, int bits) {
  for (int t = 0; t < count; t += 2, weight++) {
    const Words a = words_at(at[t] + byte), b = words_at(at[t + 1] + byte);
    Words upper = a, level[2];
    if (bits == 3) {
      const Words c = upper_of(at[t] + dim / 4 + byte / 2), d = upper_of(at[t + 1] + dim / 4 + byte / 2);
      upper = part ? _mm256_unpackhi_epi8(c, d) : _mm256_unpacklo_epi8(c, d);
    }
    levels_of(part ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b), upper, j, bits, x, level);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const Words by = _mm256_set1_epi32((int)weight[i * (TILE / 2)]);
      s[i][0] = added(s[i][0], level[0], by);
      s[i][1] = added(s[i][1], level[1], by);
    }
  }
}

INLINE void weigh_as(const Field *v, const uint8_t *const *at, int count, const uint32_t *weight, vf4 unit, const LevelBytes *x,
                     float *out, int bits) {
  const int64_t dim = v->dim, fields = 8 / lower(bits);
  for (int64_t byte = 0; byte < dim / fields; byte += 32)
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
#pragma GCC unroll 4
      for (int j = 0; j < fields; j++, out += 2 * LANES) {
        Words s[4][2];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) s[i / 2][i % 2] = _mm256_setzero_si256();
        sums_as(at, byte, dim, count, weight, x, s, j, part, bits);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
          float *to = out + i / 2 * dim + i % 2 * LANES;
          store(to, load(to) + (vf)_mm256_cvtepi32_ps(s[i / 2][i % 2]) * unit[i / 2]);
        }
      }
}

/* out[n] += sum_t w[n][t] level[t]; `w`: with the tokens' scales in it, 0 beyond the last, of which `at` has an even number */
void whole_turned_weigh(const Field *v, const float *w, int64_t rows, const uint8_t *const *at, int count, const Turned *x,
                        float *out) {
  const LevelBytes *const levels = &x->v_levels;
  uint32_t weight[4][TILE / 2] __attribute__((aligned(32)));
  for (int64_t n = 0; n < rows; n += 4, w += 4 * TILE, out += 4 * v->dim) {
    vf largest[4] = {{0}}, none[4] = {{0}}; /* as of queries */
    for (int i = 0; i < 4; i++)
      for (int t = 0; t < BATCH; t += LANES) {
        const vf y = load(w + i * TILE + t);
        largest[i] = larger(largest[i], magnitude(y));
        none[i] += y * 0;
      }
    /* 14 bits, so that LEVEL times it, BATCH times, is below 2^31 */
    vf4 unit = units_of_four(largest) * 2 + sums_of_four(none);
    const vf4 many = 1 / unit;
    for (int i = 0; i < 4; i++)
      for (int t = 0; t < BATCH; t += HALF)
        _mm256_store_si256((Words *)(weight[i] + t / 2),
                           whole_numbers(load(w + i * TILE + t) * many[i], load(w + i * TILE + t + LANES) * many[i]));
    unit *= levels->unit;
    if (v->bits == 4) weigh_as(v, at, count, weight[0], unit, levels, out, 4);
    else if (v->bits == 3) weigh_as(v, at, count, weight[0], unit, levels, out, 3);
    else weigh_as(v, at, count, weight[0], unit, levels, out, 2);
  }
}

/* The channel of number `i` of a result, [line, part, field, half, lane] */
int64_t whole_turned_channel(const Field *v, int64_t i) {
  const int64_t fields = 8 / lower((int)v->bits), lane = i % LANES, half = i / LANES % 2, field = i / HALF % fields;
  const int64_t part = i / HALF / fields % 2, line = i / HALF / fields / 2;
  return (line * 32 + lane / 4 * 16 + part * 8 + half * 4 + lane % 4) * fields + field;
}
#endif
