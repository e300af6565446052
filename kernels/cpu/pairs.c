/* Keys and values of 2 and 4 bits as pairs of bfloat16, for queries that were bfloat16 themselves.

   As for the matrix unit (tiles.c), a code goes under the exponent of 1: f = 1 + code / 2^bits, exact in bfloat16. Here
   the other factors have one plane only: x = scale * query, or scale * weight, rounded. With `mid` the middle of all f,
     x * f = round(x) * f + (x - round(x)) * mid + (x - round(x)) * (f - mid),
   of which the last is left out: less is lost than if keys and values were rounded to bfloat16 after decoding.
     keys    a lane is a token: words of 16 tokens are turned round, and a pair is two channels of one word
     values  a lane is half a word: those of two tokens stand side by side, and a pair is a channel of both */
#include "pairs_inner.h"

#if HALVES
INLINE int fields_of(int64_t bits) { return (int)(16 / bits); } /* of half a word */
INLINE float steps_of(int64_t bits) { return (float)(1 << bits); }

int pairs_fit(const Field *f, int64_t dim, int64_t rows) {
  const int64_t groups = f->group ? dim / f->group : 0;
  if (f->dim != dim || rows > CODED_QUERIES) return 0;
  if (f->layout == MIXED) return f->bits == 4 && f->low_bits == 2 && dim % 128 == 0;
  if ((f->layout != PER_CHANNEL && f->layout != PER_TOKEN) || f->bits == 1 || (f->low && !by_bytes(f))) return 0;
  if (dim % 64 || dim * f->bits % 256) return 0;
  if (f->bits == 8 && (!BYTES || (f->layout == PER_TOKEN && f->group % 16))) return 0;
  return f->layout == PER_CHANNEL || (f->group % fields_of(f->bits) == 0 && groups <= LANES && !(groups & (groups - 1)));
}

/* 1 + code / 2^bits of one field of every half word */
INLINE __m512bh fraction(Words words, int field, int bits) {
  const int up = 7 - bits * (field + 1); /* to the top of the mantissa */
  const Words mask = _mm512_set1_epi16((short)(((1 << bits) - 1) << (7 - bits))), one = _mm512_set1_epi16(0x3f80);
  words = up >= 0 ? _mm512_slli_epi32(words, up) : _mm512_srli_epi32(words, -up);
  return (__m512bh)_mm512_ternarylogic_epi32(words, mask, one, 0xea); /* words & mask | one */
}

/* Two registers, rounded: number i of the first, then number i of the second. */
INLINE Words rounded(vf first, vf second, Words order) {
  return _mm512_permutexvar_epi16(order, (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

/* sum + what pairs add up to */
INLINE vf added(vf sum, Words pairs) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
}

static void pair_queries(int64_t bits, int64_t dim, const float *q, int64_t rows, Queries *x) {
  const int fields = fields_of(bits);
  float *even = x->even, *odd = x->odd;
  for (const float *end = q + rows * dim; q < end; q += 2 * fields)
    for (int j = 0; j < fields; j++) *even++ = q[j], *odd++ = q[fields + j];
}

void pairs_keys(const Field *k, const float *q, int64_t rows, Pairs *x) {
  pair_queries(k->bits, k->dim, q, rows, x->keys);
  if (k->layout == MIXED) pair_queries(k->low_bits, k->dim, q, rows, x->keys + 1);
  memset(x->from, 0, sizeof x->from);
  memset(x->to, 0, sizeof x->to);
}

/* The queries times the scales of a key group. */
void take_pairs(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x) {
  const int64_t dim = k->dim, half = dim / 2;
  const float mid = middle(bits);
  float scale[256], zero[256];
  vf exact[CODED_QUERIES] = {{0}}, kept[CODED_QUERIES] = {{0}};
  uint16_t places[32];
  for (int i = 0; i < 32; i++) places[i] = (uint16_t)(i / 2 + i % 2 * 16);
  const Words order = _mm512_loadu_si512(places);
  widen_run(k->scale, group * dim, dim, k->dtype, scale);
  widen_run(k->zero, group * dim, dim, k->dtype, zero);
  for (int64_t i = 0; i < half; i += LANES) {
    vf s0, s1, z0, z1;
    split(scale + 2 * i, fields_of(bits), &s0, &s1);
    split(zero + 2 * i, fields_of(bits), &z0, &z1);
    s0 *= steps_of(bits), s1 *= steps_of(bits);
    z0 += s0 * (mid - 1), z1 += s1 * (mid - 1);
    for (int64_t n = 0; n < rows; n++) {
      const vf q0 = load(x->even + n * half + i), q1 = load(x->odd + n * half + i);
      const Words pairs = rounded(q0 * s0, q1 * s1, order);
      exact[n] += q0 * z0 + q1 * z1;
      kept[n] = added(kept[n], pairs);
      _mm512_store_si512(x->part + n * half + i, pairs);
    }
  }
  for (int64_t n = 0; n < rows; n++) x->add[n] = sum(exact[n] - kept[n] * mid);
}

/* For `blocks` times 16 tokens. One block has two sums of each score, as one would wait for itself. */
INLINE void products_as(const Queries *x, int64_t rows, int64_t dim, const uint8_t *const *at, float *scores, int bits,
                        int blocks) {
  const int fields = fields_of(bits);
  const int64_t half = dim / 2, bytes = dim * bits / 8;
  for (int64_t n = 0; n < rows; n += 4) {
    __m512 s[2][4];
    for (int i = 0; i < 8; i++) s[i / 4][i % 4] = _mm512_setzero_ps();
    const uint32_t *q = x->part + n * half;
    for (int64_t from = 0; from < bytes; from += 16) {
      Words words[2][4];
      for (int b = 0; b < blocks; b++) turn_round(at + 16 * b, from, words[b]);
#pragma GCC unroll 4
      for (int w = 0; w < 4; w++)
#pragma GCC unroll 8
        for (int j = 0; j < fields; j++, q++) {
          __m512bh f[2];
          for (int b = 0; b < blocks; b++) f[b] = fraction(words[b][w], j, bits);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32((int)q[i * half]);
            if (blocks == 1) s[j % 2][i] = _mm512_dpbf16_ps(s[j % 2][i], f[0], a);
            else
              for (int b = 0; b < 2; b++) s[b][i] = _mm512_dpbf16_ps(s[b][i], f[b], a);
          }
        }
    }
    for (int i = 0; i < 4; i++) {
      const vf add = splat(x->add[n + i]);
      float *to = scores + (n + i) * TILE;
      if (blocks == 1) store(to, (vf)s[0][i] + (vf)s[1][i] + add);
      else store(to, (vf)s[0][i] + add), store(to + LANES, (vf)s[1][i] + add);
    }
  }
}

#define PRODUCTS(bits, blocks)                                                                                           \
  static void products_##bits##_##blocks(const Queries *x, int64_t rows, int64_t dim, const uint8_t *const *at, float *s) { \
    products_as(x, rows, dim, at, s, bits, blocks);                                                                      \
  }
PRODUCTS(2, 1) PRODUCTS(2, 2) PRODUCTS(4, 1) PRODUCTS(4, 2)

/* scores[n][i] = q[n] . key[i] for the `n` keys of this width and group that are at `at`, which has room for TILE */
void pair_products(const Field *k, int64_t bits, const Queries *x, int64_t rows, const uint8_t **at, int n, float *scores) {
  const int wide = n > LANES;
  const int64_t dim = k->dim;
  for (int i = n; i < (wide ? TILE : LANES); i++) at[i] = at[n - 1];
  if (by_bytes(k)) byte_products(k, x, rows, at, wide, scores);
  else if (bits == 4) (wide ? products_4_2 : products_4_1)(x, rows, dim, at, scores);
  else (wide ? products_2_2 : products_2_1)(x, rows, dim, at, scores);
}

/* scores[n][t] = q[n] . key[t] of a batch, in runs of one key group */
void pairs_dots(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores) {
  const int mixed = k->layout == MIXED, narrow = mixed && tokens->narrow; /* a mixed page has a group of each width */
  const int64_t *token = tokens->token, *index = mixed ? tokens->index : token, group = mixed ? k->page : k->group;
  const int64_t bits = narrow ? k->low_bits : k->bits, size = k->dim * bits / 8;
  const uint8_t *data = narrow ? k->low : k->data, *at[TILE];
  int64_t *from = x->from + narrow, *end = x->to + narrow;
  float found[CODED_QUERIES * TILE];
  for (int t = 0, n; t < tokens->count; t += n) {
    if (token[t] < *from || token[t] >= *end) {
      const int64_t number = token[t] / group, which = mixed ? 2 * number + narrow : number;
      if (by_bytes(k)) take_bytes(k, rows, which, x->keys);
      else take_pairs(k, bits, rows, which, x->keys + narrow);
      *from = number * group;
      *end = *from + group;
    }
    for (n = 0; t + n < tokens->count && token[t + n] >= *from && token[t + n] < *end; n++) at[n] = data + index[t + n] * size;
    float *to = n == TILE ? scores : found;
    pair_products(k, bits, x->keys + narrow, rows, at, n, to);
    for (int64_t i = 0; to == found && i < rows; i++)
      memcpy(scores + i * TILE + t, found + i * TILE, sizeof(float) * n);
  }
}

void pairs_values(const Field *v, Pairs *x) {
  const int64_t group = v->layout == MIXED ? v->dim : v->group, groups = v->dim / group, fields = fields_of(v->bits);
  for (int64_t i = 0; i < v->dim; i++)
    x->channel[i] = (int16_t)(half_of(i / LANES / fields, i % LANES, lines_are_whole(v)) * fields + i / LANES % fields);
  for (int64_t r = 0; r < v->dim / LANES / fields; r++)
    for (int i = 0; i < LANES; i++) x->group[r][i] = (int32_t)(x->channel[r * fields * LANES + i] / group);
  for (int i = 0; i < LANES; i++) x->token[i] = (int32_t)(i / groups);
  for (int64_t i = 0; i < 2 * LANES; i++)
    x->two[i] = (uint16_t)(i / (2 * groups) * 2 * groups + i % 2 * groups + i / 2 % groups);
  x->page[0] = x->page[1] = -1;
}

/* Weights of four rows times scales. */
static void weigh_scales(const Pairs *known, Weights *x, const float *p, int64_t groups, float mid) {
  const Words order = _mm512_loadu_si512(known->two), each = _mm512_set1_epi32(known->token[LANES - 1] + 1);
  Words then = _mm512_loadu_si512(known->token);
  vf exact[4] = {{0}}, kept[4] = {{0}};
  for (int64_t d = 0; d < TILE * groups; d += 2 * LANES) {
    const Words first = then, second = _mm512_add_epi32(first, each);
    then = _mm512_add_epi32(second, each);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512 a = (__m512)load(p + i * TILE), b = (__m512)load(p + i * TILE + LANES);
      const vf p0 = (vf)_mm512_permutex2var_ps(a, first, b), p1 = (vf)_mm512_permutex2var_ps(a, second, b);
      const Words pairs = rounded(load(x->scale + d) * p0, load(x->scale + d + LANES) * p1, order);
      exact[i] += load(x->zero + d) * p0 + load(x->zero + d + LANES) * p1;
      kept[i] = added(kept[i], pairs);
      _mm512_storeu_si512(x->weight[i] + d / 2, pairs);
    }
  }
  for (int i = 0; i < 4; i++) x->add[i] = over_groups(exact[i] - kept[i] * mid, groups);
}

INLINE void sums_as(const Pairs *known, const Weights *x, int64_t dim, int64_t groups, int count, float *out, int bits,
                    int whole) {
  const int fields = fields_of(bits);
  for (int64_t r = 0; r < dim / LANES / fields; r++) {
    const Words of = _mm512_loadu_si512(known->group[r]);
#pragma GCC unroll 2
    for (int first = 0; first < fields; first += 4) {
      float *to = out + (r * fields + first) * LANES;
      __m512 s[4][4];
      for (int i = 0; i < 4; i++) {
        const __m512 add = _mm512_permutexvar_ps(of, (__m512)x->add[i]);
        for (int j = 0; j < 4; j++) s[i][j] = _mm512_add_ps((__m512)load(to + i * dim + j * LANES), add);
      }
      for (int t = 0; t < count; t += 2) {
        const Words words = side_by_side(x->at[t], x->at[t + 1], r, whole);
        __m512bh w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
          w[i] = (__m512bh)_mm512_permutexvar_epi32(of, _mm512_loadu_si512(x->weight[i] + t / 2 * groups));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const __m512bh f = fraction(words, first + j, bits);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) s[i][j] = _mm512_dpbf16_ps(s[i][j], f, w[i]);
        }
      }
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) store(to + i * dim + j * LANES, (vf)s[i][j]);
    }
  }
}

#define SUMS(bits, whole)                                                                                          \
  static void sums_##bits##_##whole(const Pairs *known, const Weights *x, int64_t dim, int64_t groups, int count, \
                                    float *out) {                                                                  \
    sums_as(known, x, dim, groups, count, out, bits, whole);                                                       \
  }
SUMS(2, 0) SUMS(2, 1) SUMS(4, 0) SUMS(4, 1)

/* out[n] += sum_t p[n][t] value[t] of the first `count` tokens; the scales of the others are 0 */
void pair_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out) {
  const int whole = lines_are_whole(v);
  if (count % 2) x->at[count] = x->at[count - 1];
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE, out += 4 * v->dim) {
    weigh_scales(known, x, p, groups, middle(v->bits));
    if (v->bits == 4) (whole ? sums_4_1 : sums_4_0)(known, x, v->dim, groups, count, out);
    else (whole ? sums_2_1 : sums_2_0)(known, x, v->dim, groups, count, out);
  }
}

/* As `pair_sums`, for a batch; the channels of `out` in an order of their own */
void pairs_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *known, float *out) {
  if (v->layout == MIXED) {
    pairs_weigh_mixed(v, p, rows, tokens, known, out);
    return;
  }
  const int64_t groups = v->dim / v->group, *token = tokens->token;
  const int count = tokens->count;
  const int bytes = by_bytes(v);
  const float steps = !bytes ? steps_of(v->bits) : byte_step(v), under = !bytes ? middle(v->bits) - 1 : -byte_zero(v);
  Weights x;
  token_ranges(v, token, count, groups, x.scale, x.zero);
  for (int64_t i = count * groups; i < TILE * groups; i++) x.scale[i] = x.zero[i] = 0;
  for (int t = 0; t < count; t++) x.at[t] = (const uint8_t *)v->data + token[t] * (v->dim * v->bits / 8);
  for (int64_t i = 0; i < TILE * groups; i += LANES) {
    const vf scale = load(x.scale + i) * steps;
    store(x.zero + i, load(x.zero + i) + scale * under);
    store(x.scale + i, scale);
  }
  if (bytes) byte_sums(known, &x, v, groups, p, rows, count, out);
  else pair_sums(known, &x, v, groups, p, rows, count, out);
}

void pairs_unsort(const Field *v, const Pairs *x, float *out, int64_t rows) {
  float sorted[256];
  for (int64_t n = 0; n < rows; n++, out += v->dim) {
    memcpy(sorted, out, sizeof(float) * v->dim);
    for (int64_t i = 0; i < v->dim; i++) out[x->channel[i]] = sorted[i];
  }
}
#else
int pairs_fit(const Field *f, int64_t dim, int64_t rows) { return (void)f, (void)dim, (void)rows, 0; }
void pairs_keys(const Field *k, const float *q, int64_t rows, Pairs *x) { (void)k, (void)q, (void)rows, (void)x; }
void pairs_values(const Field *v, Pairs *x) { (void)v, (void)x; }
void pairs_dots(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores) {
  (void)k, (void)rows, (void)tokens, (void)x, (void)scores;
}
void pairs_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *x, float *out) {
  (void)v, (void)p, (void)rows, (void)tokens, (void)x, (void)out;
}
void pairs_unsort(const Field *v, const Pairs *x, float *out, int64_t rows) { (void)v, (void)x, (void)out, (void)rows; }
#endif
