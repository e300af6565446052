/* Values that are codes, by whole numbers of 16 bits (whole.c): products of a channel of two tokens at once. */
#include "whole_inner.h"

#if WHOLE
#define EXPANDED (TILE / 2 * LANES + LANES)

/* What values are multiplied by. */
typedef struct {
  float scale[EXPANDED * 2], zero[EXPANDED * 2];             /* [token, group], 0 beyond the last token */
  uint32_t weight[4][EXPANDED] __attribute__((aligned(32))); /* [row][two tokens, group] */
  vf add[4], unit[4];                                       /* [row]: by group */
  const uint8_t *at[TILE]; /* of an odd number the last token stands twice */
} Weights;

/* The half word of a lane of register `r`, as unpacking puts them */
INLINE int64_t half_of(int64_t r, int64_t lane) { return r / 2 * HALF + lane / 4 * 8 + r % 2 * 4 + lane % 4; }

void pairs_values(const Field *v, Pairs *x) {
  const int64_t fields = fields_of(v->bits), group = v->layout == MIXED ? v->dim : v->group;
  int16_t *channel = x->channel;
  for (int64_t r = 0; r < v->dim / LANES / fields; r++) {
    for (int64_t lane = 0; lane < LANES; lane++) x->group[r][lane] = (int32_t)(half_of(r, lane) * fields / group);
    for (int64_t j = 0; j < fields; j++)
      for (int64_t lane = 0; lane < LANES; lane++) *channel++ = (int16_t)(half_of(r, lane) * fields + j);
  }
  x->page[0] = x->page[1] = -1;
}

/* LANES / groups numbers, each for all groups */
INLINE vf repeated(const float *p, int groups) {
  switch (groups) {
    case 1: return load(p);
    case 2: return spread((vf)_mm256_castps128_ps256(_mm_loadu_ps(p)), (vi){0, 0, 1, 1, 2, 2, 3, 3});
    case 4: return spread((vf)_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)p)), (vi){0, 0, 0, 0, 1, 1, 1, 1});
    default: return splat(*p);
  }
}

/* Whole numbers of [token, group] as [two tokens, group, token] */
INLINE Words by_two(Words x, int groups) {
  const __m128i two = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const __m128i four = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  switch (groups) {
    case 1: return x;
    case 2: return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(two));
    case 4: return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(four));
    default: {
      const __m128i a = _mm256_castsi256_si128(x), b = _mm256_extracti128_si256(x, 1);
      return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
    }
  }
}

/* Lane i becomes what JOIN makes of those lanes that are of group i % groups. */
#define OVER_GROUPS(name, JOIN)                                                    \
  INLINE vf name(vf x, int groups) {                                               \
    if (groups <= 4) x = JOIN(x, PICK(x, x, 4, 5, 6, 7, 0, 1, 2, 3));              \
    if (groups <= 2) x = JOIN(x, PICK(x, x, 2, 3, 0, 1, 6, 7, 4, 5));              \
    if (groups <= 1) x = JOIN(x, PICK(x, x, 1, 0, 3, 2, 5, 4, 7, 6));              \
    return x;                                                                      \
  }
#define SUM(a, b) ((a) + (b))
OVER_GROUPS(sum_of_groups, SUM)
OVER_GROUPS(largest_of_groups, larger)

/* Weights of four rows times scales. Each group of channels has a unit of its own: beside that of an outlying channel, little
   would be left of the others. */
INLINE void weigh_scales_as(Weights *x, const float *p, int groups) {
  const int each = LANES / groups;
  vf exact[4] = {{0}}, largest[4] = {{0}};
  float by[4][TILE * LANES];
  for (int t = 0; t < TILE; t += each) {
    const vf scale = load(x->scale + t * groups), zero = load(x->zero + t * groups);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const vf weight = repeated(p + i * TILE + t, groups), y = scale * weight;
      exact[i] += zero * weight;
      largest[i] = larger(largest[i], magnitude(y));
      store(by[i] + t * groups, y);
    }
  }
  for (int i = 0; i < 4; i++) {
    x->add[i] = sum_of_groups(exact[i], groups);
    x->unit[i] = unit_of(largest_of_groups(largest[i], groups));
    const vf many = 1 / x->unit[i];
    for (int d = 0; d < TILE * groups; d += HALF)
      _mm256_store_si256((Words *)(x->weight[i] + d / 2),
                         by_two(whole_numbers(load(by[i] + d) * many, load(by[i] + d + LANES) * many), groups));
  }
}

static void weigh_scales(Weights *x, const float *p, int64_t groups) {
  switch (groups) { /* a constant, so that each loop is specialised */
    case 1: weigh_scales_as(x, p, 1); break;
    case 2: weigh_scales_as(x, p, 2); break;
    case 4: weigh_scales_as(x, p, 4); break;
    default: weigh_scales_as(x, p, 8);
  }
}

/* One register of the values' half words, of two tokens each, for four rows that are `dim` apart. `weight`: of the first two
   tokens, for each lane or for all of them; those of the next two are `step` behind, those of the next row `row`. */
typedef struct {
  const uint8_t *const *at;
  int64_t low, byte, step, row, dim; /* `low`: how far behind a token's codes is what refines them */
  int count, second; /* whether it is the line's second register */
  const uint32_t *weight;
} Part;

INLINE Words side_by_side(const uint8_t *a, const uint8_t *b, int second) {
  return second ? _mm256_unpackhi_epi16(words_at(a), words_at(b)) : _mm256_unpacklo_epi16(words_at(a), words_at(b));
}

/* Two fields from number `first` on */
INLINE void sums_as(const Part *x, Words s[4][2], int first, int bits, int fine, int second, int alike) {
  const uint32_t *weight = x->weight;
  for (int t = 0; t < x->count; t += 2, weight += x->step) {
    const uint8_t *const p = x->at[t] + x->byte, *const next = x->at[t + 1] + x->byte;
    Words half[2] = {side_by_side(p, next, second)};
    if (fine) joined(half[0], side_by_side(p + x->low, next + x->low, second), half);
    const Words a = codes_in(half, first, bits, fine), b = codes_in(half, first + 1, bits, fine);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const uint32_t *const w = weight + i * x->row;
      const Words by = alike ? _mm256_set1_epi32((int)*w) : words_at(w);
      s[i][0] = added(s[i][0], a, by);
      s[i][1] = added(s[i][1], b, by);
    }
  }
}

INLINE void register_as(const Part *x, const Weights *w, vi group, float *out, int bits, int fine, int second, int alike) {
#pragma GCC unroll 4
  for (int j = 0; j < 16 / bits; j += 2) {
    Words s[4][2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i / 2][i % 2] = _mm256_setzero_si256();
    sums_as(x, s, j, bits, fine, second, alike);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const vf unit = spread(w->unit[i], group), add = spread(w->add[i], group);
      float *to = out + i * x->dim + j * LANES;
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) store(to + k * LANES, load(to + k * LANES) + ((vf)_mm256_cvtepi32_ps(s[i][k]) * unit + add));
    }
  }
}

#define REGISTER(name, bits, fine)                                                                 \
  static void name(const Part *x, const Weights *w, const vi *group, float *out, int alike) {      \
    if (alike) {                                                                                   \
      if (x->second) register_as(x, w, *group, out, bits, fine, 1, 1);                             \
      else register_as(x, w, *group, out, bits, fine, 0, 1);                                       \
    } else if (x->second) register_as(x, w, *group, out, bits, fine, 1, 0);                        \
    else register_as(x, w, *group, out, bits, fine, 0, 0);                                         \
  }
REGISTER(register_2, 2, 0)
REGISTER(register_4, 4, 0)
REGISTER(register_8, 8, 0)
REGISTER(register_fine, 4, 1)

/* The weights of a register's lanes, whose groups these are. */
static void spread_weights(const Weights *x, vi group, int64_t groups, int count, uint32_t *out) {
  const int base = group[0] & -4; /* of four groups, from which a shuffle is quicker */
  if (group[LANES - 1] < base + 4) {
    const Words places = (Words)((group - base) * 0x04040404 + 0x03020100);
    for (int t = 0; t < count; t += 2)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++, out += LANES) {
        const __m128i four = _mm_loadu_si128((const __m128i *)(x->weight[i] + t / 2 * groups + base));
        _mm256_store_si256((Words *)out, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(four), places));
      }
    return;
  }
  for (int t = 0; t < count; t += 2)
    for (int i = 0; i < 4; i++, out += LANES)
      *(vi *)out = (vi)spread(*(const vf *)(x->weight[i] + t / 2 * groups), group);
}

/* out[n] += sum_t p[n][t] value[t] of the first `count` tokens; the scales of the others are 0 */
static void weigh(const Field *v, const Pairs *known, Weights *x, int64_t groups, const float *p, int64_t rows, int count,
                  float *out) {
  const int fields = (int)fields_of(v->bits), fine = refined(v);
  uint32_t room[TILE / 2 * 4 * LANES] __attribute__((aligned(32)));
  if (count % 2) x->at[count] = x->at[count - 1];
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE) {
    weigh_scales(x, p, groups);
    vi held = {-1};
    for (int64_t r = 0; r < v->dim / LANES / fields; r++, out += fields * LANES) {
      const vi group = *(const vi *)known->group[r];
      const int alike = group[0] == group[LANES - 1];
      if (!alike && memcmp(&group, &held, sizeof group)) spread_weights(x, held = group, groups, count, room);
      const Part part = {.at = x->at, .low = fine_of(v), .byte = r / 2 * 32, .dim = v->dim, .count = count,
                         .second = (int)(r % 2), .weight = alike ? x->weight[0] + group[0] : room,
                         .step = alike ? groups : 4 * LANES, .row = alike ? EXPANDED : LANES};
      (fine ? register_fine : v->bits == 8 ? register_8 : v->bits == 4 ? register_4 : register_2)(&part, x, &group, out, alike);
    }
    out += 3 * v->dim;
  }
}

/* A page's factors for its channels are applied to the sum over its tokens; what is between the codes of 2 is 0. */
static void weigh_two_widths(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *known, float *out) {
  const int64_t dim = v->dim;
  const int narrow = tokens->narrow;
  uint8_t room[TILE][128] __attribute__((aligned(64)));
  float weights[rows * TILE], sums[rows * dim] __attribute__((aligned(64)));
  Weights x;
  for (int t = 0, run; t < tokens->count; t += run) {
    int64_t page;
    run = of_page(v, tokens, t, &page);
    slot_ranges(v, tokens->token + t, run, x.scale, x.zero);
    for (int j = 0; j < run; j++) x.at[j] = codes_of(v, tokens, t + j, 0, room[j]);
    for (int j = 0; j < TILE && narrow; j += LANES) store(x.scale + j, load(x.scale + j) / 4);
    memset(sums, 0, sizeof sums);
    weigh(v, known, &x, 1, weights_of(p, rows, t, run, tokens->count, weights), rows, run, sums);
    add_times(sums, factors_of(v, page, narrow, known), rows, dim, out);
  }
}

/* As `weigh`, for a batch; the channels of `out` in an order of their own */
void pairs_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *known, float *out) {
  if (v->layout == MIXED) {
    weigh_two_widths(v, p, rows, tokens, known, out);
    return;
  }
  const int64_t groups = v->dim / v->group, *token = tokens->token;
  const int count = tokens->count;
  Weights x;
  token_ranges(v, token, count, groups, x.scale, x.zero);
  for (int64_t i = count * groups; i < TILE * groups; i++) x.scale[i] = x.zero[i] = 0;
  for (int64_t i = 0; i < count * groups && refined(v); i++)
    x.scale[i] *= NIBBLE_STEP, x.zero[i] -= x.scale[i] * NIBBLE_ZERO;
  for (int t = 0; t < count; t++) x.at[t] = (const uint8_t *)v->data + token[t] * (v->dim * v->bits / 8);
  weigh(v, known, &x, groups, p, rows, count, out);
}

void pairs_unsort(const Field *v, const Pairs *x, float *out, int64_t rows) {
  float sorted[256];
  for (int64_t n = 0; n < rows; n++, out += v->dim) {
    memcpy(sorted, out, sizeof(float) * v->dim);
    for (int64_t i = 0; i < v->dim; i++) out[x->channel[i]] = sorted[i];
  }
}
#endif
