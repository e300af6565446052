/* Codes of turned vectors (kernels/turboquant.py): a code's low bits choose a level in a register, one scale per token.

   Scores are taken against turned queries, and sums of values are turned back when a row is done: nothing is turned per
   token. The codes of a register's channels go to every lane, which shifts its own down. What is left above the code's bits
   does no harm, as levels repeat up to 16. 16 channels of 4 bits are two words: even lanes get the first 8 channels and
   odd ones the others, so queries and results are kept in that order meanwhile (`channel_of`).
   Queries that were bfloat16 meet levels as bfloat16, in pairs: of channels for keys, of tokens for values; or both are whole
   numbers (whole_turned.c). */
#include "turned.h"
#include "pairs_inner.h"

/* ---- turning ------------------------------------------------------------------------------------------------------ */

void turn_rows(const Field *f, const float *x, int64_t rows, int64_t stride, float *out) {
  const float *turn = f->channel;
  const int64_t dim = f->dim;
  for (int64_t n = 0; n < rows; n++, x += stride, out += stride) {
    memset(out, 0, sizeof(float) * stride);
    for (int64_t i = 0; i < dim; i++) {
      const float *row = turn + i * dim;
      int64_t d = 0;
      for (; d + LANES <= dim; d += LANES) store(out + d, load(out + d) + load(row + d) * x[i]);
      for (; d < dim; d++) out[d] += row[d] * x[i];
    }
  }
}

/* ---- floats ------------------------------------------------------------------------------------------------------- */

INLINE int64_t channel_of(int64_t lane, int bits) { return LANES == 16 && bits == 4 ? lane / 2 + lane % 2 * 8 : lane; }

/* The bits of LANES channels, `bits` of each and 32 in all at most, in every lane. */
INLINE vu words_at(const uint8_t *at, int64_t block, int bits) {
  const int64_t from = block * LANES * bits;
  uint32_t x = 0;
  memcpy(&x, at + from / 8, (LANES * bits + 7) / 8);
  return (LANES * bits % 8 ? x >> from % 8 : x) + (vu){0};
}

/* The code of each of LANES channels in the lowest bits of its lane. `at`: the token's codes; of 3 bits, `top` as well. */
INLINE vu codes_at(const uint8_t *at, const uint8_t *top, int64_t block, int bits) {
  const vu lane = EACH_LANE;
#if LANES == 16
  if (bits == 4) {
    typedef uint64_t vd __attribute__((vector_size(64)));
    uint64_t x;
    memcpy(&x, at + block * 8, 8);
    return (vu)(x + (vd){0}) >> (lane >> 1 << 2);
  }
#endif
  if (bits != 3) return words_at(at, block, bits) >> lane * (uint32_t)bits;
  const vu high = words_at(top, block, 1) << 16 >> (lane + 14); /* with its bit above the two others */
  return ((words_at(at, block, 2) >> (lane << 1)) & 3) | (high & ~3u);
}

/* 16 levels; of fewer than 4 bits, they repeat. */
typedef struct { vf part[16 / LANES]; } Levels;

INLINE Levels levels_at(const float *p) {
  Levels x;
  for (int i = 0; i < 16 / LANES; i++) x.part[i] = load(p + i * LANES);
  return x;
}

INLINE vf level_of(vu code, Levels levels, int bits) {
#if defined(__AVX512F__)
  (void)bits;
  return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)levels.part[0]);
#elif LANES == 8
  const __m256 low = _mm256_permutevar8x32_ps((__m256)levels.part[0], (__m256i)code);
  if (bits < 4) return (vf)low;
  const __m256 high = _mm256_permutevar8x32_ps((__m256)levels.part[1], (__m256i)code);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#elif NEON
  const uint8x16_t at = bytes_at_lanes(code & ((1u << bits) - 1)), first = (uint8x16_t)levels.part[0];
  if (bits <= 2) return (vf)vqtbl1q_u8(first, at);
  const uint8x16_t second = (uint8x16_t)levels.part[1];
  if (bits == 3) return (vf)vqtbl2q_u8((uint8x16x2_t){{first, second}}, at);
  return (vf)vqtbl4q_u8((uint8x16x4_t){{first, second, (uint8x16_t)levels.part[2], (uint8x16_t)levels.part[3]}}, at);
#else
  const int parts = 1 << bits > LANES ? (1 << bits) / LANES : 1;
  vf out = spread(levels.part[0], (vi)(code & (LANES - 1)));
  for (int i = 1; i < parts; i++)
    out = choose((vi)((code / LANES & (uint32_t)(parts - 1)) == (uint32_t)i), spread(levels.part[i], (vi)(code & (LANES - 1))), out);
  return out;
#endif
}

INLINE const uint8_t *bytes_at(const Field *f, int64_t token) {
  return (const uint8_t *)f->data + token * (f->dim * f->bits / 8);
}

/* Scales of a batch's tokens: those of tokens that follow each other are one run of numbers. */
INLINE void scales_of(const Field *f, const Tokens *x, float *scale) {
  for (int t = 0, run; t < x->count; t += run) {
    for (run = 1; t + run < x->count && x->token[t + run] == x->token[t] + run;) run++;
    widen_run(f->scale, x->token[t], run, f->dtype, scale + t);
  }
}

INLINE void dots_as(const Field *f, const Turned *x, int64_t rows, const uint8_t *const *at, float *found, int bits) {
  const int64_t dim = f->dim;
  const Levels levels = levels_at(f->zero);
  for (int64_t n = 0; n < rows; n += 4) {
    vf s[AT_ONCE] = {{0}};
    for (int64_t block = 0; block < dim / LANES; block++) {
      vf k[ACROSS];
#pragma GCC unroll 4
      for (int j = 0; j < ACROSS; j++) {
        k[j] = level_of(codes_at(at[j], at[j] + dim / 4, block, bits), levels, bits);
        KEEP(k[j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const vf a = load(x->q + (n + i) * dim + block * LANES);
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) s[ACROSS * i + j] += a * k[j];
      }
    }
    *(Totals *)(found + n * ACROSS) = totals(s);
  }
}

/* out += sum_t w[t] * level[t], ACROSS registers of channels at a time; `w` [row, TILE] has the tokens' scales in it */
INLINE void weigh_as(const Field *f, const float *w, int64_t rows, const uint8_t *const *at, int count, float *out, int bits) {
  const int64_t dim = f->dim;
  const Levels levels = levels_at(f->zero);
  for (int64_t n = 0; n < rows; n += 4)
    for (int64_t first = 0; first < dim / LANES; first += ACROSS) {
      float *to = out + n * dim + first * LANES;
      vf s[4][ACROSS];
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < ACROSS; j++) s[i][j] = load(to + i * dim + j * LANES);
      for (int t = 0; t < count; t++) {
        vf weight[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          weight[i] = splat(w[(n + i) * TILE + t]);
          KEEP(weight[i]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) {
          vf value = level_of(codes_at(at[t], at[t] + dim / 4, first + j, bits), levels, bits);
          KEEP(value);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) s[i][j] += value * weight[i];
        }
      }
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < ACROSS; j++) store(to + i * dim + j * LANES, s[i][j]);
    }
}

/* ---- pairs of bfloat16 -------------------------------------------------------------------------------------------- */

#if HALVES

/* Bits of the codes that lie side by side: of 3, the upper ones lie behind the others. */
INLINE int64_t lower(int64_t bits) { return bits == 3 ? 2 : bits; }

INLINE int halves_lie(const Field *f) { return f->bits > 1 && f->dim * lower(f->bits) % 256 == 0; }

/* The lowest two bits of one, the others of the other. */
INLINE __m512i joined(__m512i low, __m512i high) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), low, high, 0xca);
}

/* 32 levels as bfloat16: a code's low bits choose among them as well. */
INLINE __m512i half_levels(const Field *f) {
  const __m512 levels = (__m512)load(f->zero);
  return (__m512i)_mm512_cvtne2ps_pbh(levels, levels);
}

/* The channel of number `i` of 32: copies of the same words stand side by side, each shifted further. */
INLINE int64_t paired_channel(int64_t i, int64_t bits) {
  const int64_t words = 2 * lower(bits);
  return i % words * (16 / lower(bits)) + i / words;
}

INLINE void half_dots_as(const Field *f, const Turned *x, int64_t rows, const uint8_t *const *at, float *found, int bits) {
  const int64_t dim = f->dim;
  const __m512i levels = half_levels(f);
  uint16_t shifts[32];
  const int each = (int)lower(bits);
  for (int i = 0; i < 32; i++) shifts[i] = (uint16_t)(i / (2 * each) * each);
  const __m512i shift = _mm512_loadu_si512(shifts), above = _mm512_srli_epi16(shift, 1);
  const __m512i byte = _mm512_set1_epi64((long long)0x8003800280018000); /* one to each half word, zeros above */
  for (int64_t n = 0; n < rows; n += 4) {
    __m512 s[16];
    for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 32) {
      __m512bh k[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const uint8_t *p = at[j] + d * each / 8;
        uint64_t x = 0;
        if (bits != 4) memcpy(&x, p, 8);
        __m512i code = bits == 4 ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)) : _mm512_set1_epi64((long long)x);
        code = _mm512_srlv_epi16(code, shift);
        if (bits == 3) { /* a byte for each half word */
          uint32_t y;
          memcpy(&y, at[j] + dim / 4 + d / 8, 4);
          const __m512i high = _mm512_shuffle_epi8(_mm512_set1_epi32((int)y), byte);
          code = joined(code, _mm512_srlv_epi16(_mm512_slli_epi16(high, 2), above));
        }
        k[j] = (__m512bh)_mm512_permutexvar_epi16(code, levels);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const __m512bh a = (__m512bh)_mm512_load_si512(x->pairs + (n + i) * dim + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) s[4 * i + j] = _mm512_dpbf16_ps(s[4 * i + j], a, k[j]);
      }
    }
    store(found + n * 4, sums((const vf *)s));
  }
}

/* A byte of each token for each of these half words. */
INLINE __m512i bytes_beside(const uint8_t *a, const uint8_t *b, int64_t r) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(a + r * 16)));
  const __m512i y = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(b + r * 16)));
  return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

/* As `weigh_as`, two tokens at a time; `w` [row, two tokens] are pairs of bfloat16 */
INLINE void half_weigh_as(const Field *f, const uint32_t *w, int64_t rows, const uint8_t *const *at, int count, float *out,
                          int bits, int whole) {
  const int64_t dim = f->dim;
  const int each = (int)lower(bits), fields = 16 / each;
  const __m512i levels = half_levels(f);
  for (int64_t n = 0; n < rows; n += 4)
    for (int64_t r = 0; r < dim / LANES / fields; r++)
#pragma GCC unroll 2
      for (int first = 0; first < fields; first += 4) {
        float *to = out + n * dim + (r * fields + first) * LANES;
        __m512 s[4][4];
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < 4; j++) s[i][j] = (__m512)load(to + i * dim + j * LANES);
        for (int t = 0; t < count; t += 2) {
          const __m512i words = side_by_side(at[t], at[t + 1], r, whole);
          const __m512i above = bits == 3 ? bytes_beside(at[t] + dim / 4, at[t + 1] + dim / 4, r) : words;
          __m512bh weight[4];
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) weight[i] = (__m512bh)_mm512_set1_epi32((int)w[(n + i) * (TILE / 2) + t / 2]);
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++) {
            const int field = first + j;
            __m512i code = _mm512_srli_epi16(words, field * each);
            if (bits == 3) code = joined(code, field < 2 ? _mm512_slli_epi16(above, 2 - field) : _mm512_srli_epi16(above, field - 2));
            const __m512bh value = (__m512bh)_mm512_permutexvar_epi16(code, levels);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) s[i][j] = _mm512_dpbf16_ps(s[i][j], value, weight[i]);
          }
        }
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < 4; j++) store(to + i * dim + j * LANES, (vf)s[i][j]);
      }
}

INLINE void half_weigh(const Field *f, const float *w, int64_t rows, const uint8_t **at, int count, float *out) {
  uint32_t pairs[CODED_QUERIES * TILE / 2] __attribute__((aligned(64)));
  for (int64_t i = 0; i < rows * TILE; i += 2 * LANES)
    _mm512_store_si512(pairs + i / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(w + i + LANES), (__m512)load(w + i)));
  if (count % 2) at[count] = at[count - 1]; /* with a weight of 0 */
  const int whole = lines_are_whole(f);
  if (f->bits == 3) half_weigh_as(f, pairs, rows, at, count, out, 3, 0);
  else if (f->bits == 4 && whole) half_weigh_as(f, pairs, rows, at, count, out, 4, 1);
  else if (f->bits == 4) half_weigh_as(f, pairs, rows, at, count, out, 4, 0);
  else if (whole) half_weigh_as(f, pairs, rows, at, count, out, 2, 1);
  else half_weigh_as(f, pairs, rows, at, count, out, 2, 0);
}

INLINE int64_t half_channel(const Field *f, int64_t i) {
  const int64_t fields = 16 / lower(f->bits);
  return half_of(i / LANES / fields, i % LANES, lines_are_whole(f)) * fields + i / LANES % fields;
}

#elif WHOLE
INLINE int halves_lie(const Field *f) { return whole_turned_lie(f); }
INLINE int64_t half_channel(const Field *f, int64_t i) { return whole_turned_channel(f, i); }
#else
INLINE int halves_lie(const Field *f) { return (void)f, 0; }
INLINE int64_t half_channel(const Field *f, int64_t i) { return (void)f, i; }
#endif

/* ---- a batch ------------------------------------------------------------------------------------------------------ */

/* Whether these functions know the layout. */
int turned_lie(const Field *f, int64_t dim, int64_t rows) {
  return f->layout == TURNED && f->dim == dim && dim % 64 == 0 && rows <= CODED_QUERIES;
}

/* `q`: turned */
void turned_open(const Field *k, const Field *v, const float *q, int64_t rows, int halves, Turned *x) {
  x->k_halves = halves && halves_lie(k);
  x->v_halves = halves && halves_lie(v);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t i = 0; i < k->dim; i++) x->q[n * k->dim + i] = q[n * k->dim + (i & -LANES) + channel_of(i % LANES, (int)k->bits)];
#if HALVES
  float order[256];
  for (int64_t n = 0; n < rows && x->k_halves; n++) {
    for (int64_t i = 0; i < k->dim; i++) order[i] = q[n * k->dim + (i & -32) + paired_channel(i % 32, k->bits)];
    for (int64_t i = 0; i < k->dim; i += 32)
      _mm512_store_si512(x->pairs + n * k->dim + i,
                         (__m512i)_mm512_cvtne2ps_pbh((__m512)load(order + i + LANES), (__m512)load(order + i)));
  }
#elif WHOLE
  if (x->k_halves) whole_turned_keys(k, q, rows, x);
  if (x->v_halves) whole_turned_values(v, x);
#endif
}

void turned_dots(const Field *k, int64_t rows, const Tokens *tokens, const Turned *x, float *scores) {
  float found[CODED_QUERIES * ACROSS], scale[TILE + LANES];
  scales_of(k, tokens, scale);
#if WHOLE
  if (x->k_halves) {
    const uint8_t *all[TILE];
    for (int t = 0; t < tokens->count; t++) all[t] = bytes_at(k, tokens->token[t]);
    if (tokens->count % 2) all[tokens->count] = all[tokens->count - 1], scale[tokens->count] = 0; /* nobody asks for it */
    whole_turned_dots(k, rows, all, scale, tokens->count, x, scores);
    return;
  }
#endif
  for (int t = 0; t < tokens->count; t += ACROSS) {
    const int n = tokens->count - t < ACROSS ? tokens->count - t : ACROSS;
    const uint8_t *at[ACROSS];
    for (int j = 0; j < ACROSS; j++) at[j] = bytes_at(k, tokens->token[t + (j < n ? j : 0)]);
#if HALVES
    if (x->k_halves && k->bits == 4) half_dots_as(k, x, rows, at, found, 4);
    else if (x->k_halves && k->bits == 3) half_dots_as(k, x, rows, at, found, 3);
    else if (x->k_halves) half_dots_as(k, x, rows, at, found, 2);
    else
#endif
      switch (k->bits) { /* constants, so that each loop is specialised */
        case 1: dots_as(k, x, rows, at, found, 1); break;
        case 2: dots_as(k, x, rows, at, found, 2); break;
        case 3: dots_as(k, x, rows, at, found, 3); break;
        default: dots_as(k, x, rows, at, found, 4);
      }
    for (int64_t i = 0; i < rows; i++)
      for (int j = 0; j < n; j++) scores[i * TILE + t + j] = found[i * ACROSS + j] * scale[t + j];
  }
}

/* out[n] += sum_t p[n][t] value[t], turned, the channels of `out` in an order of their own */
void turned_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Turned *x, float *out) {
  const uint8_t *at[TILE];
  float scale[TILE + LANES] = {0}, w[CODED_QUERIES * TILE] __attribute__((aligned(64)));
  scales_of(v, tokens, scale);
  for (int t = 0; t < tokens->count; t++) at[t] = bytes_at(v, tokens->token[t]);
  for (int64_t n = 0; n < rows; n++)
    for (int t = 0; t < BATCH; t += LANES) store(w + n * TILE + t, load(p + n * TILE + t) * load(scale + t));
#if HALVES
  if (x->v_halves) {
    half_weigh(v, w, rows, at, tokens->count, out);
    return;
  }
#elif WHOLE
  if (x->v_halves) {
    if (tokens->count % 2) at[tokens->count] = at[tokens->count - 1]; /* with a weight of 0 */
    whole_turned_weigh(v, w, rows, at, tokens->count, x, out);
    return;
  }
#endif
  (void)x;
  switch (v->bits) {
    case 1: weigh_as(v, w, rows, at, tokens->count, out, 1); break;
    case 2: weigh_as(v, w, rows, at, tokens->count, out, 2); break;
    case 3: weigh_as(v, w, rows, at, tokens->count, out, 3); break;
    default: weigh_as(v, w, rows, at, tokens->count, out, 4);
  }
}

void turned_unsort(const Field *v, const Turned *x, float *out, int64_t rows) {
  float sorted[256];
  for (int64_t n = 0; n < rows; n++, out += v->dim) {
    memcpy(sorted, out, sizeof(float) * v->dim);
    for (int64_t i = 0; i < v->dim; i++)
      out[x->v_halves ? half_channel(v, i) : (i & -LANES) + channel_of(i % LANES, (int)v->bits)] = sorted[i];
  }
}

/* One token's turned vector, its channels in their order. */
void read_turned(const Field *f, int64_t token, float *out) {
  const int64_t bits = f->bits, dim = f->dim;
  const uint8_t *at = bytes_at(f, token), *top = at + dim / 4;
  float scale[LANES];
  widen_run(f->scale, token, 1, f->dtype, scale);
  Levels levels = levels_at(f->zero);
  for (int i = 0; i < 16 / LANES; i++) levels.part[i] *= *scale;
  for (int64_t block = 0; block < dim / LANES; block++) {
    vf x;
    switch (bits) {
      case 1: x = level_of(codes_at(at, top, block, 1), levels, 1); break;
      case 2: x = level_of(codes_at(at, top, block, 2), levels, 2); break;
      case 3: x = level_of(codes_at(at, top, block, 3), levels, 3); break;
      default: x = level_of(codes_at(at, top, block, 4), levels, 4);
#if LANES == 16
        x = PICK(x, x, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
    }
    store(out + block * LANES, x);
  }
  for (int64_t d = dim & -LANES; d < dim; d++) {
    int code = at[d * (bits == 3 ? 2 : bits) / 8] >> d * (bits == 3 ? 2 : bits) % 8;
    if (bits == 3) code = (code & 3) | (top[d / 8] >> d % 8 & 1) << 2;
    out[d] = ((const float *)f->zero)[code & ((1 << bits) - 1)] * *scale;
  }
}

/* ---- codes -------------------------------------------------------------------------------------------------------- */

enum { UNBIASED, LEAST, PAPER };

/* Turned vectors, and where their codes and scales go. */
typedef struct {
  int64_t vectors, dim, bits, form, threads;
  const float *x, *levels;
  uint8_t *code;
  float *scale;
} Coding;

/* The codes of LANES numbers: a search among the borders between levels, the lower half first. */
INLINE vu nearest(vf x, Levels borders, int bits) {
  vu code = {0};
  for (int step = 1 << (bits - 1); step; step >>= 1) {
    const vf border = level_of(code + (uint32_t)(step - 1), borders, bits);
    code += (vu)(x > border) & (uint32_t)step;
  }
  return code;
}

/* 8 codes, a byte each, side by side */
INLINE uint64_t together(uint64_t x, int bits) {
  if (bits == 1) return x * 0x0102040810204080u >> 56;
  x |= x >> (8 - bits);
  x &= bits == 2 ? 0x000f000f000f000fu : 0x00ff00ff00ff00ffu;
  x |= x >> (16 - 2 * bits);
  x &= bits == 2 ? 0x000000ff000000ffu : 0x0000ffff0000ffffu;
  return (x | x >> (32 - 4 * bits)) & (bits == 2 ? 0xffffu : 0xffffffffu);
}

INLINE void pack_codes(const uint8_t *code, int64_t dim, int bits, int shift, uint8_t *out) {
  const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
  for (int64_t d = 0; d < dim; d += 8, out += bits) {
    uint64_t x;
    memcpy(&x, code + d, 8);
    x = together(x >> shift & mask, bits);
    memcpy(out, &x, bits);
  }
}

void kv_turned_codes(const Coding *c) {
  const int64_t dim = c->dim, bits = c->bits, bytes = dim * bits / 8;
  const Levels levels = levels_at(c->levels);
  Levels borders; /* of those there are, all but the last are asked for */
  float after[17] = {0};
  memcpy(after, c->levels, sizeof levels);
  for (int i = 0; i < 16 / LANES; i++) borders.part[i] = (levels.part[i] + load(after + i * LANES + 1)) * 0.5f;
#pragma omp parallel for schedule(static) num_threads(c->threads)
  for (int64_t n = 0; n < c->vectors; n++) {
    const float *x = c->x + n * dim;
    uint8_t code[dim];
    vf square = {0}, along = {0}, chosen = {0};
    for (int64_t d = 0; d < dim; d += LANES) square += load(x + d) * load(x + d);
    const float whole = sum(square), size = sqrtf(whole / (float)dim);
    const vf inverse = splat(size > 0 ? 1 / size : 0);
    for (int64_t d = 0; d < dim; d += LANES) {
      const vf y = load(x + d) * inverse;
      const vu is = bits == 4 ? nearest(y, borders, 4) : bits == 3 ? nearest(y, borders, 3) : bits == 2 ? nearest(y, borders, 2) : nearest(y, borders, 1);
      const vf level = level_of(is, levels, (int)bits);
      along += load(x + d) * level;
      chosen += level * level;
      for (int i = 0; i < LANES; i++) code[d + i] = (uint8_t)is[i];
    }
    const float scale = c->form == LEAST ? sum(along) / sum(chosen) : whole / sum(along);
    c->scale[n] = c->form == PAPER ? size + whole * 0 : size == 0 ? 0 : scale; /* NaN of what is not finite */
    uint8_t *out = c->code + n * bytes;
    if (bits == 3) {
      pack_codes(code, dim, 2, 0, out);
      pack_codes(code, dim, 1, 2, out + dim / 4);
    } else if (bits == 4) pack_codes(code, dim, 4, 0, out);
    else if (bits == 2) pack_codes(code, dim, 2, 0, out);
    else pack_codes(code, dim, 1, 0, out);
  }
}
