/* Scores against keys that are codes, and sums of values that are codes, without decoding them into a tile.

   A line is a register of one token, or less: LANES words of 32 bits. Field j of every word, shifted under the exponent of 1,
   makes a register of 1 + code / 2^bits; so the channels stand in an order of their own (`channel_of`), in which
   queries and results are kept meanwhile. A token of fewer words is repeated, and each copy gives other fields.
   Nibbles that refine nibbles make bytes with these first, of even channels in the first words and of odd ones behind.
   Scales do not touch the codes: those of keys go into the queries, once for a group of tokens, and those of values
   into the weights. Zeros, and the 1, are a term of their own. */
#include "codes.h"

#define GROUPS 16 /* of a token, at most */

/* How a token's codes lie. `fields`: registers per line; with `bits`, constants, so that each loop is specialised. */
typedef struct {
  int64_t lines, words, copies;
  int fields;
} Shape;

static Shape shape_of(const Field *f) {
  if (refined(f)) return (Shape){.lines = f->dim / (4 * LANES), .words = LANES, .copies = 1, .fields = 4};
  const int64_t all = f->dim * f->bits / 32, words = all < LANES ? all : LANES;
  Shape s = {.lines = words ? all / words : 0, .words = words, .copies = words ? LANES / words : 0};
  s.fields = words ? (int)(32 / f->bits / s.copies) : 0;
  return s;
}

INLINE int64_t channel_of(const Field *f, const Shape *s, int64_t line, int64_t lane, int64_t field) {
  if (refined(f)) return line * 4 * LANES + lane % (LANES / 2) * 8 + 2 * field + lane / (LANES / 2);
  return (line * s->words + lane % s->words) * (32 / f->bits) + lane / s->words * s->fields + field;
}

/* Whether these functions know the layout. */
int codes_lie(const Field *f, int64_t dim, int64_t rows) {
  if ((f->layout != PER_CHANNEL && f->layout != PER_TOKEN) || f->dim != dim || rows > CODED_QUERIES) return 0;
  if (f->bits == 1 || f->dim % 64) return 0;
  if (refined(f)) return f->bits == 4 && (f->layout == PER_CHANNEL || (f->group % 8 == 0 && f->dim / f->group <= GROUPS));
  const Shape s = shape_of(f);
  if (s.words * s.copies != LANES || s.lines * s.words * 32 != f->dim * f->bits) return 0;
  if (s.fields != 4 && s.fields != 8 && s.fields != 16) return 0;
  return f->layout == PER_CHANNEL || (f->group % s.fields == 0 && f->dim / f->group <= GROUPS);
}

void sort_channels(const Field *f, const float *x, int64_t rows, float *out) {
  const Shape s = shape_of(f);
  for (int64_t n = 0; n < rows; n++, x += f->dim, out += f->dim)
    for (int64_t line = 0; line < s.lines; line++)
      for (int lane = 0; lane < LANES; lane++) {
        const float *from = x + channel_of(f, &s, line, lane, 0);
        float *to = out + line * s.fields * LANES + lane;
        for (int j = 0; j < s.fields; j++) to[j * LANES] = from[refined(f) ? 2 * j : j];
      }
}

/* Groups that hold nothing yet; of mixed codes each width has its own. */
void open_codes(const Field *f, KeyGroup g[2]) {
  float number[256], sorted[256];
  for (int i = 0; i < 256; i++) number[i] = (float)i;
  sort_channels(f, number, 1, sorted);
  for (int width = 0; width < 2; width++) {
    g[width].from = g[width].to = 0;
    for (int64_t i = 0; i < f->dim; i++) g[width].channel[i] = (uint8_t)sorted[i];
  }
}

void unsort_channels(const Field *f, float *x, int64_t rows) {
  const Shape s = shape_of(f);
  float sorted[256];
  for (int64_t n = 0; n < rows; n++, x += f->dim) {
    memcpy(sorted, x, sizeof(float) * f->dim);
    for (int64_t line = 0; line < s.lines; line++)
      for (int lane = 0; lane < LANES; lane++)
        for (int j = 0; j < s.fields; j++)
          x[channel_of(f, &s, line, lane, j)] = sorted[(line * s.fields + j) * LANES + lane];
  }
}

/* What fills a part of a register, several times. Put together in memory, it would be waited for there. */
INLINE vu repeated(const uint8_t *p, int copies) {
#if defined(__AVX512F__)
  if (copies == 2) return (vu)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
  if (copies == 4) return (vu)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__) && LANES == 8
  if (copies == 2) return (vu)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
#elif NEON
  if (copies == 2) return (vu)vcombine_u8(vld1_u8(p), vld1_u8(p));
#endif
  vu words;
  for (int i = 0; i < copies; i++) memcpy((char *)&words + i * (4 * LANES / copies), p, 4 * LANES / copies);
  return words;
}

/* The words of a line: `fields` per copy, so copy i begins with field i * fields. */
INLINE vu line_of(const uint8_t *p, int bits, int fields) {
  const int copies = 32 / bits / fields;
  if (copies == 1) return *(const vu *)p;
  const vu words = repeated(p, copies), lane = EACH_LANE;
  return words >> (lane / (uint32_t)(LANES / copies) * (uint32_t)(bits * fields));
}

INLINE vu placed(vu words, int field, int bits) {
  const int up = 23 - bits * (field + 1); /* to the top of the mantissa */
  return (up >= 0 ? words << up : words >> -up) & (((1u << bits) - 1) << (23 - bits));
}

/* The bytes 16 code + low of 4 * LANES channels, from their nibbles. */
INLINE vu bytes_of(const uint8_t *code, const uint8_t *low) {
  const vu lane = EACH_LANE, first = (vu)(lane < LANES / 2) & 4, then = 4 - first;
  const vu a = repeated(code, 2), b = repeated(low, 2);
  return ((a << first) & 0xf0f0f0f0u) | ((b >> then) & 0x0f0f0f0fu);
}

/* The words of a line of codes of `bits`, or of bytes that two nibbles make. */
INLINE vu read_line(const uint8_t *code, const uint8_t *low, int64_t line, int bits, int fields, int fine) {
  return fine ? bytes_of(code + line * 2 * LANES, low + line * 2 * LANES) : line_of(code + line * 4 * LANES, bits, fields);
}

/* 1 + code / 2^bits */
INLINE vf fraction(vu words, int field, int bits) { return (vf)(placed(words, field, bits) | 0x3f800000u); }

/* What a fraction f of a value code * scale + zero means: f * steps * scale + zero - under * scale. */
INLINE float steps_of(const Field *f) { return (float)(1 << f->bits); }
INLINE float under_of(const Field *f) { return (float)(1 << f->bits) + (f->low ? 0.5f : 0); }

INLINE void dots_as(const KeyGroup *g, int64_t rows, int64_t dim, const uint8_t *const *at,
                    const uint8_t *const *fine_at, int count, float *scores, int bits, int fields, int fine) {
  const int64_t lines = dim / LANES / fields;
  for (int64_t n = 0; n < rows; n += 4) {
    vf s[AT_ONCE] = {{0}};
    for (int64_t line = 0; line < lines; line++) {
      const float *a = g->q + n * dim + line * fields * LANES;
      vu words[ACROSS];
      for (int j = 0; j < ACROSS; j++) words[j] = read_line(at[j], fine_at[j], line, bits, fields, fine);
#pragma GCC unroll 16
      for (int field = 0; field < fields; field++) {
        vf k[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) {
          k[j] = fraction(words[j], field, bits);
          KEEP(k[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          vf x = load(a + i * dim + field * LANES);
#pragma GCC unroll 4
          for (int j = 0; j < ACROSS; j++) s[ACROSS * i + j] += x * k[j];
        }
      }
    }
    const Totals total = totals(s);
    for (int i = 0; i < 4; i++) {
      const va score = total.row[i] + g->add[n + i];
      if (count == ACROSS) *(va *)(scores + (n + i) * TILE) = score;
      else memcpy(scores + (n + i) * TILE, &score, sizeof(float) * count);
    }
  }
}

typedef struct {
  float scale[TILE * GROUPS + LANES], zero[TILE * GROUPS + LANES]; /* [token, group] */
  const uint8_t *at[TILE], *fine_at[TILE];
} Values;

/* out += sum_t p[t] * values[t], ACROSS registers of a line at a time */
INLINE void weigh_as(const Values *x, const float *p, int64_t rows, int64_t dim, int64_t group, int count, float *out,
                     int bits, int fields, int fine) {
  const int64_t lines = dim / LANES / fields, groups = dim / group;
  for (int64_t line = 0; line < lines; line++) {
    const int64_t begin = line * LANES * fields, base = begin / group;
    vi of; /* the group of a lane's channels, from the line's first on */
    for (int lane = 0; lane < LANES; lane++) {
      const int words = LANES * fields * bits / 32;
      const int64_t at = fine ? lane % (LANES / 2) * 8 : lane % words * (32 / bits) + lane / words * fields;
      of[lane] = (int32_t)((begin + at) / group - base);
    }
    for (int64_t n = 0; n < rows; n += 4) {
      const float *w = p + n * TILE;
      float weight[TILE][4][LANES] __attribute__((aligned(64)));
      vf add[4] = {{0}};
      for (int t = 0; t < count; t++) {
        const vf z = spread(load(x->zero + t * groups + base), of), scale = spread(load(x->scale + t * groups + base), of);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const vf by = splat(w[i * TILE + t]);
          add[i] += z * by;
          store(weight[t][i], scale * by);
        }
      }
#pragma GCC unroll 8
      for (int first = 0; first < fields; first += ACROSS) {
        float *to = out + n * dim + (line * fields + first) * LANES;
        vf s[4][ACROSS];
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < ACROSS; j++) s[i][j] = load(to + i * dim + j * LANES) + add[i];
        for (int t = 0; t < count; t++) {
          const vu words = read_line(x->at[t], x->fine_at[t], line, bits, fields, fine);
#pragma GCC unroll 4
          for (int j = 0; j < ACROSS; j++) {
            vf value = fraction(words, first + j, bits);
            KEEP(value);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) s[i][j] += value * load(weight[t][i]);
          }
        }
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < ACROSS; j++) store(to + i * dim + j * LANES, s[i][j]);
      }
    }
  }
}

#define CALL(name, bits, fields, fine) \
  static void name##_##bits##_##fields##_##fine(ARGUMENTS) { name##_as(PASSED, bits, fields, fine); }
#define SPECIALISE(name)                                                                        \
  CALL(name, 2, 4, 0) CALL(name, 2, 8, 0) CALL(name, 2, 16, 0) CALL(name, 4, 4, 0) CALL(name, 4, 8, 0) \
  CALL(name, 8, 4, 0) CALL(name, 8, 4, 1)                                                       \
  static void name(const Field *f, ARGUMENTS) {                                                 \
    const int fields = shape_of(f).fields;                                                      \
    if (f->low) name##_8_4_1(PASSED);                                                           \
    else if (f->bits == 2) (fields == 16 ? name##_2_16_0 : fields == 8 ? name##_2_8_0 : name##_2_4_0)(PASSED); \
    else if (f->bits == 4) (fields == 8 ? name##_4_8_0 : name##_4_4_0)(PASSED);                 \
    else name##_8_4_0(PASSED);                                                                  \
  }
#define ARGUMENTS                                                                                              \
  const KeyGroup *g, int64_t rows, int64_t dim, const uint8_t *const *at, const uint8_t *const *fine_at, int count, \
      float *scores
#define PASSED g, rows, dim, at, fine_at, count, scores
SPECIALISE(dots)
#undef ARGUMENTS
#undef PASSED
#define ARGUMENTS const Values *x, const float *p, int64_t rows, int64_t dim, int64_t group, int count, float *out
#define PASSED x, p, rows, dim, group, count, out
SPECIALISE(weigh)

INLINE const uint8_t *code_at(const Field *f, int64_t token) {
  return (const uint8_t *)f->data + token * (f->dim * f->bits / 8);
}
INLINE const uint8_t *fine_at(const Field *f, int64_t token) {
  return f->low ? (const uint8_t *)f->low + token * (f->dim / 2) : NULL;
}

/* Scale the queries by the ranges of this group. */
static void open_group(const Field *f, KeyGroup *g, const float *q, const float *sorted, int64_t rows, int64_t group,
                       float steps, float under) {
  const int64_t dim = f->dim;
  float scale[256] __attribute__((aligned(64))), zero[256] __attribute__((aligned(64)));
  float order[256] __attribute__((aligned(64)));
  widen_run(f->scale, group * dim, dim, f->dtype, scale);
  widen_run(f->zero, group * dim, dim, f->dtype, zero);
  for (int64_t i = 0; i < dim; i++) order[i] = scale[g->channel[i]];
  for (int64_t n = 0; n < rows; n++) {
    vf add = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
      add += load(q + n * dim + d) * (load(zero + d) - load(scale + d) * under);
      store(g->q + n * dim + d, load(sorted + n * dim + d) * (load(order + d) * steps));
    }
    g->add[n] = sum(add);
  }
}

/* scores[n][t] = q[n] . key[t]; `sorted`: q with its channels in the order of the codes */
void dots_codes(const Field *f, KeyGroup *g, const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores) {
  const int64_t *token = x->token;
  const int count = x->count;
  const uint8_t *at[ACROSS], *low[ACROSS];
  for (int t = 0, n; t < count; t += n) {
    if (token[t] < g->from || token[t] >= g->to) {
      open_group(f, g, q, sorted, rows, token[t] / f->group, steps_of(f), under_of(f));
      g->from = token[t] / f->group * f->group;
      g->to = g->from + f->group;
    }
    for (n = 1; n < ACROSS && t + n < count && token[t + n] >= g->from && token[t + n] < g->to;) n++;
    for (int j = 0; j < ACROSS; j++) {
      at[j] = code_at(f, token[t + (j < n ? j : 0)]);
      low[j] = fine_at(f, token[t + (j < n ? j : 0)]);
    }
    dots(f, g, rows, f->dim, at, low, n, scores + t);
  }
}

/* The scales and zeros of some tokens, `each` of a token: those of tokens that follow each other are one run of numbers. */
void token_ranges(const Field *f, const int64_t *token, int count, int64_t each, float *scale, float *zero) {
  for (int t = 0, run; t < count; t += run) {
    for (run = 1; t + run < count && token[t + run] == token[t] + run;) run++;
    widen_run(f->scale, token[t] * each, run * each, f->dtype, scale + t * each);
    widen_run(f->zero, token[t] * each, run * each, f->dtype, zero + t * each);
  }
}

/* The scales and zeros of some tokens in any order, one of a token, up to TILE; 0 beyond the last. */
void slot_ranges(const Field *f, const int64_t *token, int count, float *scale, float *zero) {
  const void *const from[2] = {f->scale, f->zero};
  float *const to[2] = {scale, zero};
  for (int i = 0; i < 2; i++)
    if (f->dtype == F32) {
      memset(to[i], 0, sizeof(float) * TILE);
      for (int t = 0; t < count; t++) to[i][t] = ((const float *)from[i])[token[t]];
    } else { /* side by side first */
      uint16_t number[TILE] = {0};
      for (int t = 0; t < count; t++) number[t] = ((const uint16_t *)from[i])[token[t]];
      widen_run(number, 0, TILE, f->dtype, to[i]);
    }
}

/* out[n] += sum_t p[n][t] value[t], the channels of `out` in the order of the codes */
void weigh_codes(const Field *f, const float *p, int64_t rows, const Tokens *tokens, float *out) {
  const int64_t groups = f->dim / f->group, *token = tokens->token;
  const int count = tokens->count;
  const float steps = steps_of(f), under = under_of(f);
  Values x;
  token_ranges(f, token, count, groups, x.scale, x.zero);
  for (int t = 0; t < count; t++) x.at[t] = code_at(f, token[t]), x.fine_at[t] = fine_at(f, token[t]);
  for (int64_t i = 0; i < count * groups; i += LANES) {
    vf scale = load(x.scale + i);
    store(x.zero + i, load(x.zero + i) - scale * under);
    store(x.scale + i, scale * steps);
  }
  weigh(f, &x, p, rows, f->dim, f->group, count, out);
}

/* Pages of two widths, 4 bits and 2: room is put between the codes of 2, and all are codes of 4. */

/* Narrower tokens fill half a line, and are decoded as fast. */
int mixed_lie(const Field *f, int64_t dim, int64_t rows) {
  Field four = *f;
  four.layout = PER_CHANNEL;
  four.low = NULL;
  return f->layout == MIXED && f->bits == 4 && f->low_bits == 2 && dim % 128 == 0 && codes_lie(&four, dim, rows);
}

/* How many tokens from number `t` on are of its page, `page`. */
int of_page(const Field *f, const Tokens *x, int t, int64_t *page) {
  int run = 1;
  *page = x->token[t] / f->page;
  const int64_t from = *page * f->page, to = from + f->page;
  while (t + run < x->count && x->token[t + run] >= from && x->token[t + run] < to) run++;
  return run;
}

/* As `dots_codes`; `g`: the queries scaled for the page's salient tokens, and for its others */
void dots_mixed(const Field *f, KeyGroup g[2], const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores) {
  uint8_t room[ACROSS][128] __attribute__((aligned(64)));
  const float steps = x->narrow ? 4 : 16;
  Field four = *f;
  four.low = NULL;
  g += x->narrow;
  for (int t = 0, run; t < x->count; t += run) {
    int64_t page;
    run = of_page(f, x, t, &page);
    if (g->from != page * f->page || !g->to) {
      open_group(&four, g, q, sorted, rows, 2 * page + x->narrow, steps, steps);
      g->from = page * f->page;
      g->to = g->from + f->page;
    }
    for (int j = 0; j < run; j += ACROSS) {
      const int some = run - j < ACROSS ? run - j : ACROSS;
      const uint8_t *at[ACROSS];
      for (int k = 0; k < ACROSS; k++) at[k] = codes_of(f, x, t + j + (k < some ? k : 0), 0, room[k]);
      dots(&four, g, rows, f->dim, at, at, some, scores + t + j);
    }
  }
}

/* As `weigh_codes`; a page's factors for its channels are applied to the sum over its tokens. */
void weigh_mixed(const Field *f, const float *p, int64_t rows, const Tokens *tokens, float *out) {
  const int64_t dim = f->dim, *token = tokens->token;
  uint8_t room[TILE][128] __attribute__((aligned(64)));
  float factor[256] __attribute__((aligned(64))), order[256] __attribute__((aligned(64)));
  float sums[rows * dim] __attribute__((aligned(64)));
  const float steps = tokens->narrow ? 4 : 16;
  Values x;
  Field four = *f;
  four.low = NULL;
  for (int t = 0, run; t < tokens->count; t += run) {
    int64_t page;
    run = of_page(f, tokens, t, &page);
    slot_ranges(f, token + t, run, x.scale, x.zero);
    for (int j = 0; j < run; j++) x.at[j] = codes_of(f, tokens, t + j, 0, room[j]);
    for (int j = 0; j < TILE; j += LANES) {
      store(x.scale + j, load(x.scale + j) * steps);
      store(x.zero + j, load(x.zero + j) - load(x.scale + j));
    }
    memset(sums, 0, sizeof sums);
    weigh(&four, &x, p + t, rows, dim, dim, run, sums);
    widen_run(f->channel, page * dim, dim, f->dtype, factor);
    sort_channels(&four, factor, 1, order);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d += LANES)
        store(out + r * dim + d, load(out + r * dim + d) + load(sums + r * dim + d) * load(order + d));
  }
}
