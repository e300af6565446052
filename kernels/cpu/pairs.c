/* Keys and values of 2 and 4 bits as pairs of bfloat16, for queries that were bfloat16 themselves.

   As for the matrix unit (tiles.c), a code goes under the exponent of 1: f = 1 + code / 128, exact in bfloat16, which takes
   one shift and one logical operation. Here the other factors have one plane only: x = scale * query, or scale * weight,
   rounded. With `mid` the middle of all f,
     x * f = round(x) * f + (x - round(x)) * mid + (x - round(x)) * (f - mid),
   of which the last is left out: less is lost than if keys and values were rounded to bfloat16 after decoding.
     keys    a lane is a token: words of 16 tokens are turned round, and a pair is two channels of one word
     values  a lane is half a word: those of two tokens stand side by side, and a pair is a channel of both. Groups take
             turns in the lanes, so that the weights of two tokens need only be repeated */
#include "pairs_inner.h"

#if HALVES
#define APART 4 /* sums of one score that are made side by side */

INLINE int fields_of(int64_t bits) { return (int)(16 / bits); } /* of half a word */
/* Channels of the bytes of a value that are taken at once. */
INLINE int64_t at_once(const Field *f) { return LANES * fields_of(f->bits) << lines_are_whole(f); }

/* How many groups they are of, at least 1. */
INLINE int64_t nearest(const Field *f, int64_t group) { return group < at_once(f) ? at_once(f) / group : 1; }

int pairs_fit(const Field *f, int64_t dim, int64_t rows) {
  const int64_t groups = f->group ? dim / f->group : 0;
  if (f->dim != dim || rows > CODED_QUERIES) return 0;
  if (f->layout == MIXED) return f->bits == 4 && f->low_bits == 2 && dim % 128 == 0;
  if ((f->layout != PER_CHANNEL && f->layout != PER_TOKEN) || f->bits == 1 || (f->low && !by_bytes(f))) return 0;
  if (dim % 64 || dim * f->bits % 256) return 0;
  if (f->bits == 8 && (!BYTES || (f->layout == PER_TOKEN && f->group % 16))) return 0;
  if (f->layout == PER_CHANNEL) return 1;
  return f->group % fields_of(f->bits) == 0 && groups <= LANES && !(groups & (groups - 1)) &&
         (by_bytes(f) || f->group % at_once(f) == 0 || at_once(f) % f->group == 0);
}

/* 1 + code / 128 of one field of every half word */
INLINE __m512bh fraction(Words words, int field, int bits) {
  const Words mask = _mm512_set1_epi16((short)((1 << bits) - 1)), one = _mm512_set1_epi16(0x3f80);
  if (field) words = _mm512_srli_epi32(words, bits * field);
  return (__m512bh)_mm512_ternarylogic_epi32(words, mask, one, 0xea); /* words & mask | one */
}

/* Two registers, rounded: numbers of the first, then of the second. */
INLINE Words rounded(vf first, vf second) { return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

/* sum + what pairs add up to */
INLINE vf added(vf sum, Words pairs) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
}

/* Queries and the places of channels in the order of pairs: those of a word are field j of its first half and of its second. */
static void pair_queries(int64_t bits, int64_t dim, const float *q, int64_t rows, Queries *x) {
  const unsigned fields = (unsigned)fields_of(bits), log = (unsigned)__builtin_ctz(fields);
  for (unsigned i = 0; i < PAIRED; i++)
    x->order[i] = (uint16_t)((i >> (log + 1) << (log + 1)) + (i % 2 << log) + ((i / 2) & (fields - 1)));
  for (int64_t d = 0; d < rows * dim; d += PAIRED) {
    vf pairs[2];
    in_order(q, d, F32, x->order, pairs);
    store(x->q + d, pairs[0]), store(x->q + d + LANES, pairs[1]);
  }
}

void pairs_keys(const Field *k, const float *q, int64_t rows, Pairs *x) {
  pair_queries(k->bits, k->dim, q, rows, x->keys);
  if (k->layout == MIXED) pair_queries(k->low_bits, k->dim, q, rows, x->keys + 1);
  memset(x->from, 0, sizeof x->from);
  memset(x->to, 0, sizeof x->to);
}

INLINE void take_pairs_as(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x, int64_t dtype) {
  const int64_t dim = k->dim;
  const float mid = middle(bits);
  for (int64_t n = 0; n < rows; n += 4) {
    vf exact[4] = {{0}}, kept[4] = {{0}};
    for (int64_t d = 0; d < dim; d += PAIRED) {
      vf s[2], z[2];
      in_order(k->scale, group * dim + d, dtype, x->order, s);
      in_order(k->zero, group * dim + d, dtype, x->order, z);
      for (int j = 0; j < 2; j++) s[j] *= STEPS, z[j] += s[j] * (mid - 1);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const float *q = x->q + (n + i) * dim + d;
        const vf q0 = load(q), q1 = load(q + LANES);
        const Words pairs = rounded(q0 * s[0], q1 * s[1]);
        exact[i] += q0 * z[0];
        exact[i] += q1 * z[1];
        kept[i] = added(kept[i], pairs);
        _mm512_store_si512(x->part + ((n + i) * dim + d) / 2, pairs);
      }
    }
    for (int i = 0; i < 4; i++) exact[i] -= kept[i] * mid;
    sums_of_four(exact, x->add + n);
  }
}

/* The queries times the scales of a key group. */
void take_pairs(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x) {
  if (k->dtype == BF16) take_pairs_as(k, bits, rows, group, x, BF16); /* constants, so that each loop is specialised */
  else if (k->dtype == F16) take_pairs_as(k, bits, rows, group, x, F16);
  else take_pairs_as(k, bits, rows, group, x, F32);
}

/* s + f times the same pair in all lanes */
INLINE __m512 product(__m512 s, __m512bh f, const uint32_t *pair) {
#ifdef __clang__
  return _mm512_dpbf16_ps(s, f, (__m512bh)_mm512_set1_epi32((int)*pair));
#else /* gcc would load it apart */
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(s) : "v"(f), "m"(*pair));
  return s;
#endif
}

/* Scores of four rows and 16 tokens, `bytes` long each. A score has several sums, as one would wait for itself. */
INLINE void products_as(const uint32_t *q, const float *add, const uint8_t *const *at, int64_t bytes, float *scores, int bits) {
  const int fields = fields_of(bits);
  const int64_t half = bytes * 4 / bits;
  __m512 s[APART][4];
#pragma GCC unroll 16
  for (int i = 0; i < APART * 4; i++) s[i / 4][i % 4] = _mm512_setzero_ps();
  for (int64_t from = 0; from < bytes; from += 32) {
    Words words[8];
    turn_both(at, from, words);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++)
#pragma GCC unroll 8
      for (int j = 0; j < fields; j++, q++) {
        const __m512bh f = fraction(words[w], j, bits);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) s[j % APART][i] = product(s[j % APART][i], f, q + i * half);
      }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    vf all = splat(add[i]); /* last, as it is known late */
#pragma GCC unroll 4
    for (int j = 0; j < APART; j++) all += (vf)s[j][i];
    store(scores + i * TILE, all);
  }
}

#define PRODUCTS(bits)                                                                                                       \
  static void products_##bits(const uint32_t *q, const float *add, const uint8_t *const *at, int64_t bytes, float *scores) { \
    products_as(q, add, at, bytes, scores, bits);                                                                            \
  }
PRODUCTS(2) PRODUCTS(4)

/* scores[n][i] = q[n] . key[i] for the `n` keys of this width and group that are at `at`, which has room for TILE */
void pair_products(const Field *k, int64_t bits, const Queries *x, int64_t rows, const uint8_t **at, int n, float *scores) {
  const int wide = n > LANES;
  for (int i = n; i < (wide ? TILE : LANES); i++) at[i] = at[n - 1];
  if (by_bytes(k)) byte_products(k, x, rows, at, wide, scores);
  else
    for (int64_t i = 0; i < rows; i += 4)
      for (int t = 0; t < n; t += LANES)
        (bits == 4 ? products_4 : products_2)(x->part + i * (k->dim / 2), x->add + i, at + t, k->dim * bits / 8,
                                              scores + i * TILE + t);
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
    if (tokens->together) n = (int)(*end - token[t] < TILE - t ? *end - token[t] : TILE - t);
    else
      for (n = 0; t + n < tokens->count && token[t + n] >= *from && token[t + n] < *end;) n++;
    for (int i = 0; i < n; i++) at[i] = data + index[t + i] * size;
    float *to = n == TILE ? scores : found;
    pair_products(k, bits, x->keys + narrow, rows, at, n, to);
    for (int64_t i = 0; to == found && i < rows; i++)
      memcpy(scores + i * TILE + t, found + i * TILE, sizeof(float) * n);
  }
}

/* Groups take turns in the lanes of values; whole numbers (pairs_bytes.c) leave half words where unpacking puts them. */
void pairs_values(const Field *v, Pairs *x) {
  const int64_t group = v->layout == MIXED ? v->dim : v->group, groups = v->dim / group, fields = fields_of(v->bits);
  const int64_t unit = at_once(v), near = nearest(v, group), wide = unit / fields / LANES;
  const int each = (int)(LANES / groups), log = __builtin_ctz((unsigned)each), turns = __builtin_ctz((unsigned)near);
  int64_t half[8][LANES]; /* of a lane of a register */
  for (int64_t r = 0; r < v->dim / LANES / fields; r++)
    for (int64_t i = 0; i < LANES; i++) {
      const int64_t number = (i & (near - 1)) * (wide * LANES >> turns) + (r & (wide - 1)) * (LANES >> turns) + (i >> turns);
      half[r][i] = by_bytes(v) ? half_of(r, i, lines_are_whole(v)) : (r & -wide) * LANES + number;
      x->half[r & 1][2 * i] = (uint16_t)number;
      x->half[r & 1][2 * i + 1] = (uint16_t)(number + PAIRED);
      x->group[r][i] = (int32_t)((uint32_t)(half[r][i] * fields) / (uint32_t)group);
    }
  int16_t *channel = x->channel;
  for (int64_t r = 0; r < v->dim / LANES / fields; r++)
    for (int64_t j = 0; j < fields; j++)
      for (int64_t i = 0; i < LANES; i++) *channel++ = (int16_t)(half[r][i] * fields + j);
  for (int t = 0; t < 2 * each; t++) /* lanes of scales, [group, token], are from [token, group] */
    for (int g = 0; g < groups; g++) {
      const int i = (t >> log) * LANES + (g << log) + (t & (each - 1));
      x->order[i] = (uint16_t)(t * groups + g);
      x->two[(t / 2 * groups + g) * 2 + t % 2] = (uint16_t)i;
    }
  for (int i = 0; i < LANES; i++) x->turn[i] = (int32_t)(((i & (groups - 1)) << log) + (i * each >> 4));
  x->page[0] = x->page[1] = -1;
}

/* Weights of four rows times scales. */
INLINE void weigh_scales_as(const Pairs *known, Weights *x, const float *p, int count, float mid, int groups) {
  const Words order = _mm512_loadu_si512(known->two), turn = _mm512_loadu_si512(known->turn);
  const int each = LANES / groups;
  vf exact[4] = {{0}}, kept[4] = {{0}};
  for (int t = 0; t < count; t += 2 * each) {
    const float *scale = x->scale + t * groups, *zero = x->zero + t * groups;
    const vf s0 = load(scale), s1 = load(scale + LANES), z0 = load(zero), z1 = load(zero + LANES);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const vf p0 = repeated(p + i * TILE + t, each), p1 = repeated(p + i * TILE + t + each, each);
      const Words pairs = _mm512_permutexvar_epi16(order, rounded(s0 * p0, s1 * p1));
      exact[i] += z0 * p0;
      exact[i] += z1 * p1;
      kept[i] = added(kept[i], pairs);
      _mm512_store_si512(x->weight[i] + t / 2 * groups, pairs);
    }
  }
  for (int i = 0; i < 4; i++)
    x->add[i] = sum_of_groups((vf)_mm512_permutexvar_ps(turn, (__m512)exact[i]) - kept[i] * mid, groups);
}

static void weigh_scales(const Pairs *known, Weights *x, const float *p, int count, float mid, int64_t groups) {
  switch (groups) { /* a constant, so that each loop is specialised */
    case 1: weigh_scales_as(known, x, p, count, mid, 1); break;
    case 2: weigh_scales_as(known, x, p, count, mid, 2); break;
    case 4: weigh_scales_as(known, x, p, count, mid, 4); break;
    case 8: weigh_scales_as(known, x, p, count, mid, 8); break;
    default: weigh_scales_as(known, x, p, count, mid, 16);
  }
}

/* One register of the values' half words, of which four fields: for four rows that are `dim` apart. */
typedef struct {
  const uint8_t *const *token;
  int64_t from, end;   /* what is taken of each token; how many tokens */
  const float *weight; /* of the first two tokens and its first group; those of the next two are `groups` behind */
  int64_t groups;
  const int32_t *group;
  const uint16_t *half;
} Part;

INLINE void sums_as(const Part *x, const vf add[4], int64_t dim, float *out, int bits, int first, int whole, int near) {
  const Words half = _mm512_loadu_si512(x->half);
  const float *weight = x->weight;
  const int64_t from = x->from, next = x->groups;
  float *const to[4] = {out, out + dim, out + 2 * dim, out + 3 * dim};
  __m512 s[4][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) s[i][j] = (__m512)load(to[i] + j * LANES);
  for (const uint8_t *const *at = x->token, *const *const end = at + x->end; at < end; at += 2, weight += next) {
    const Words words = two_halves(at[0] + from, at[1] + from, half, whole);
    __m512bh w[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) w[i] = (__m512bh)repeated(weight + i * WEIGHTS, near);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512bh f = fraction(words, first + j, bits);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) s[i][j] = _mm512_dpbf16_ps(s[i][j], f, w[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) { /* last, as it is known late */
    const vf more = (vf)_mm512_permutexvar_ps(_mm512_loadu_si512(x->group), (__m512)add[i]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) store(to[i] + j * LANES, (vf)s[i][j] + more);
  }
}

typedef void Sums(const Part *x, const vf add[4], int64_t dim, float *out);
#define SUMS(bits, whole, near)                                                                           \
  static void sums_##bits##_##whole##_##near(const Part *x, const vf add[4], int64_t dim, float *out) {   \
    sums_as(x, add, dim, out, bits, 0, whole, near);                                                      \
    if (bits == 2) sums_as(x, add, dim, out + 4 * LANES, bits, 4, whole, near);                           \
  }
#define EACH_SUMS(bits, whole) \
  SUMS(bits, whole, 1) SUMS(bits, whole, 2) SUMS(bits, whole, 4) SUMS(bits, whole, 8) SUMS(bits, whole, 16)
EACH_SUMS(2, 0) EACH_SUMS(2, 1) EACH_SUMS(4, 0) EACH_SUMS(4, 1)
#define ALL_SUMS(bits, whole)                                                                            \
  {sums_##bits##_##whole##_1, sums_##bits##_##whole##_2, sums_##bits##_##whole##_4, sums_##bits##_##whole##_8, \
   sums_##bits##_##whole##_16}
static Sums *const SUMS_OF[2][2][5] = {{ALL_SUMS(2, 0), ALL_SUMS(2, 1)}, {ALL_SUMS(4, 0), ALL_SUMS(4, 1)}};

/* out[n] += sum_t p[n][t] value[t] of the first `count` tokens; the scales of the others are 0 */
void pair_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out) {
  const int whole = lines_are_whole(v);
  const int64_t fields = fields_of(v->bits);
  Sums *const sums = SUMS_OF[v->bits == 4][whole][__builtin_ctzll((uint64_t)nearest(v, v->dim / groups))];
  if (count % 2) x->at[count] = x->at[count - 1];
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE) {
    weigh_scales(known, x, p, count, middle(v->bits), groups);
    for (int64_t r = 0; r < v->dim / LANES / fields; r++, out += fields * LANES) {
      const Part part = {.token = x->at, .from = whole ? r / 2 * 64 : r * 32, .end = count, .groups = groups,
                         .weight = (const float *)x->weight[0] + known->group[r][0], .group = known->group[r],
                         .half = known->half[whole ? r % 2 : 0]};
      sums(&part, x->add, v->dim, out);
    }
    out += 3 * v->dim;
  }
}

INLINE void ranges_as(const void *scale, const void *zero, int64_t groups, const uint16_t *order, float steps, float under,
                      Weights *x, int64_t dtype) {
  for (int64_t i = 0; i < TILE * groups; i += PAIRED) {
    vf s[2], z[2];
    in_order(scale, i, dtype, order, s);
    in_order(zero, i, dtype, order, z);
    for (int j = 0; j < 2; j++) {
      s[j] *= steps;
      store(x->scale + i + j * LANES, s[j]);
      store(x->zero + i + j * LANES, z[j] + s[j] * under);
    }
  }
}

/* The scales and zeros of a batch, for factors of `steps` each and what is `under` them; 0 beyond the last token. */
static void ranges_in_order(const Field *v, const Pairs *known, const Tokens *tokens, int64_t groups, float steps, float under,
                            Weights *x) {
  const int64_t *token = tokens->token;
  const int count = tokens->count;
  const int64_t size = v->dtype == F32 ? 4 : 2, each = groups * size;
  const char *scale = v->scale, *zero = v->zero;
  char near[2][TILE * LANES * 4] __attribute__((aligned(64)));
  int run;
  if (tokens->together) scale += token[0] * each, zero += token[0] * each;
  else { /* side by side first */
    memset(near[0], 0, TILE * each);
    memset(near[1], 0, TILE * each);
    for (int t = 0; t < count; t += run) {
      run = following(token, t, count);
      memcpy(near[0] + t * each, scale + token[t] * each, run * each);
      memcpy(near[1] + t * each, zero + token[t] * each, run * each);
    }
    scale = near[0], zero = near[1];
  }
  if (v->dtype == BF16) ranges_as(scale, zero, groups, known->order, steps, under, x, BF16);
  else if (v->dtype == F16) ranges_as(scale, zero, groups, known->order, steps, under, x, F16);
  else ranges_as(scale, zero, groups, known->order, steps, under, x, F32);
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
  const float steps = !bytes ? STEPS : byte_step(v), under = !bytes ? middle(v->bits) - 1 : -byte_zero(v);
  Weights x;
  ranges_in_order(v, known, tokens, groups, steps, under, &x);
  for (int t = 0; t < count; t++) x.at[t] = (const uint8_t *)v->data + token[t] * (v->dim * v->bits / 8);
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
#elif !WHOLE
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
