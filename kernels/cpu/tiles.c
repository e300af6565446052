/* Keys and values of 2, 4 and 8 bits by the matrix unit (AMX), which multiplies bfloat16 and adds in float32.

   A code of 2 or 4 bits goes under the exponent of 1 as the highest bits of a mantissa: f = 1 + code / 2^bits, exact in
   bfloat16, by one rotation and one logical operation. As code * scale + zero = f * (2^bits scale) + (zero - 2^bits
   scale), and as f = code is exact for 8 bits, the scales of keys go into the queries, those of values into the
   weights, and the rest is a term of its own. Queries and
   weights keep all their bits: a float is the sum of three bfloat16, its planes. Tiles:
     scores  [token, (plane, row)]    += keys [token, 32 channels]     * queries [32 channels, (plane, row)]
     results [(plane, row), channel]  += weights [(plane, row), token] * values [32 tokens, 16 channels]
   the second operand by pairs along the inner axis. */
#include "tiles_inner.h"

#ifdef MATRIX_UNIT
#include <sys/syscall.h>
#include <unistd.h>

int matrix_allowed(void) {
  static int known; /* 0: not asked yet */
  int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (!found) {
    found = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) ? -1 : 1;
    __atomic_store_n(&known, found, __ATOMIC_RELAXED);
  }
  return found > 0;
}

/* A pair of lines is 32 channels, and must have one scale; groups are told apart by halving. */
int tiles_fit(const Field *f, int64_t dim, int64_t rows) {
  const int64_t groups = f->group ? dim / f->group : 0;
  if (f->layout == MIXED)
    return f->bits == 4 && f->low_bits == 2 && f->dim == dim && dim % 32 == 0 && rows <= CODED_QUERIES && matrix_allowed();
  if ((f->layout != PER_CHANNEL && f->layout != PER_TOKEN) || (f->bits != 2 && f->bits != 4 && f->bits != 8)) return 0;
  if (f->dim != dim || dim % 32 || rows > CODED_QUERIES) return 0;
  if (f->layout == PER_TOKEN && (f->group % 32 || groups & (groups - 1))) return 0;
  return matrix_allowed();
}

/* What a number f counts: a fraction's steps and the 1 before it, or the code itself; of two nibbles their byte, which
   stands for 8 less. */
INLINE float steps_of(const Field *f) { return f->low ? 1.0f / 16 : f->bits == 8 ? 1 : (float)(1 << f->bits); }
INLINE float one_of(const Field *f) { return f->low ? 8 : f->bits == 8 ? 0 : 1; }

/* Bytes of 32 channels from their nibbles, the even ones first. */
INLINE Line nibbles(const uint8_t *code, const uint8_t *low) {
  const __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)code));
  const __m512i rest = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)low)), mask = _mm512_set1_epi32(15);
  const __m512i even = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(high, mask), 4), _mm512_and_si512(rest, mask));
  const __m512i odd = _mm512_or_si512(_mm512_andnot_si512(mask, high), _mm512_srli_epi32(rest, 4));
  return (Line)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(odd), _mm512_cvtepi32_ps(even));
}

/* Codes of 32 channels, the even ones first. */
INLINE Line bytes(const uint8_t *p) {
  const __m256i words = _mm256_loadu_si256((const __m256i *)p);
  const __m512i even = _mm512_cvtepu16_epi32(_mm256_and_si256(words, _mm256_set1_epi16(0xff)));
  const __m512i odd = _mm512_cvtepu16_epi32(_mm256_srli_epi16(words, 8));
  return (Line)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(odd), _mm512_cvtepi32_ps(even));
}

/* Fractions of 32 channels. Their words are repeated, and each copy gives another field. */
INLINE Line fractions(const uint8_t *p, int64_t bits, Line turn) {
  if (bits == 8) return bytes(p);
  int64_t word;
  memcpy(&word, p, 8);
  Line words = bits == 2 ? _mm512_set1_epi64(word) : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
  words = _mm512_shldv_epi16(words, words, turn);
  const Line mask = _mm512_set1_epi16((short)(((1 << bits) - 1) << (7 - bits))), one = _mm512_set1_epi16(0x3f80);
  return _mm512_ternarylogic_epi32(words, mask, one, 0xea); /* words & mask | one */
}

/* Ready for a task's queries: of 8 channels, the four even ones by four rows, then the odd ones. */
void tiles_open(const Field *k, const float *q, int64_t rows, Tiles *x) {
  struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1, .rows = {16, 16, 16, 16, 16, 12, 16, 12}};
  for (int i = 0; i < 8; i++) shape.bytes[i] = 64;
  WRITTEN();
  _tile_loadconfig(&shape);
  float *at = x->pairs;
  for (int64_t n = 0; n < rows; n += 4)
    for (int64_t d = 0; d < k->dim; d += 8)
      for (int i = 0; i < 32; i++) /* (odd, pair, row) */
        *at++ = q[(n + i % 4) * k->dim + (d & -32) + channel_of(order_of(k), (int)(d & 31) + i / 4 % 4 * 2 + i / 16)];
  memset(x->from, 0, sizeof x->from);
  memset(x->to, 0, sizeof x->to);
  x->page[0] = x->page[1] = -1;
}

void tiles_close(void) { _tile_release(); }

/* What the highest 16 bits leave of floats. Cut off, not rounded, so that nothing is lost. */
INLINE __m512 rest_of(__m512 x) {
  return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536))));
}

/* Pairs of one plane: the even channel's highest 16 bits below the odd one's */
INLINE Line joined(__m512 even, __m512 odd) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd),
                                   _mm512_set1_epi32(-65536), 0xf8); /* even >> 16 | odd & mask */
}

/* The queries times the scales of a key group; scales in the order of the lines. `steps`, `one`: what its numbers count */
void take_group(const Field *k, const float *q, int64_t rows, int64_t group, float steps, float one, int which, Tiles *x) {
  const int64_t dim = k->dim;
  float scale[256], zero[256], order[256 + LANES];
  int32_t place[32];
  widen_run(k->scale, group * dim, dim, k->dtype, scale);
  widen_run(k->zero, group * dim, dim, k->dtype, zero);
  const int64_t order_bits = order_of(k);
  for (int i = 0; i < 32; i++)
    place[i] = order_bits == 2 ? channel_of(2, i) : order_bits == 4 ? channel_of(4, i) : channel_of(8, i);
  for (int64_t d = 0; d < dim; d += LANES) {
    store(scale + d, load(scale + d) * steps);
    store(zero + d, load(zero + d) - load(scale + d) * one);
  }
  for (int64_t d = 0; d < dim; d += LANES) {
    const __m512 a = _mm512_loadu_ps(scale + (d & -32)), b = _mm512_loadu_ps(scale + (d & -32) + 16);
    _mm512_storeu_ps(order + d, _mm512_permutex2var_ps(a, _mm512_loadu_si512(place + d % 32), b));
  }
  for (int64_t n = 0; n < rows; n++) {
    vf add = {0};
    for (int64_t d = 0; d < dim; d += LANES) add += load(q + n * dim + d) * load(zero + d);
    x->add[which][n] = sum(add);
  }
  const __m512i evens = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const float *pairs = x->pairs;
  for (int64_t n = 0; n < rows / 4; n++)
    for (int64_t d = 0; d < dim; d += 8, pairs += 32) {
      const __m512 s = _mm512_loadu_ps(order + d);
      __m512 even = _mm512_mul_ps(_mm512_loadu_ps(pairs), _mm512_permutexvar_ps(evens, s));
      __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(pairs + 16), _mm512_permutexvar_ps(odds, s));
      const Line p0 = joined(even, odd);
      even = rest_of(even), odd = rest_of(odd);
      const Line p1 = joined(even, odd), p2 = joined(rest_of(even), rest_of(odd));
      const Line a = _mm512_permutex2var_epi64(p0, low, p1), b = _mm512_permutex2var_epi64(p0, high, p1);
      uint16_t *row = x->part[which][n][d / 32] + d % 32 / 2 * 32; /* a pair each: its planes, and what is not looked at */
      for (int i = 0; i < 4; i++) {
        const int64_t at = i % 2 * 4, plane = 8 + 2 * i;
        const __m512i take = _mm512_setr_epi64(at, at + 1, at + 2, at + 3, plane, plane + 1, plane, plane + 1);
        _mm512_store_si512(row + 32 * i, _mm512_permutex2var_epi64(i < 2 ? a : b, take, p2));
      }
    }
}

/* [token, group] to [group, token]: all even numbers, then all odd ones, as often as groups can be halved. */
INLINE void by_group(float *x, int64_t groups, float *out) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const int64_t n = TILE * groups;
  float *from = x, *to = out;
  for (; groups > 1; groups /= 2) {
    for (int64_t i = 0; i < n; i += 32) {
      const __m512 a = _mm512_loadu_ps(from + i), b = _mm512_loadu_ps(from + i + 16);
      _mm512_storeu_ps(to + i / 2, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(to + n / 2 + i / 2, _mm512_permutex2var_ps(a, odd, b));
    }
    float *done = from;
    from = to;
    to = done;
  }
  if (from != out) memcpy(out, from, sizeof(float) * n);
}

static void value_scales(const Field *v, const int64_t *token, int count, Tiles *x) {
  const int64_t groups = v->dim / v->group;
  float scale[8 * TILE + LANES], zero[8 * TILE + LANES];
  token_ranges(v, token, count, groups, scale, zero);
  for (int64_t i = count * groups; i < TILE * groups; i++) scale[i] = zero[i] = 0;
  by_group(scale, groups, x->scale);
  by_group(zero, groups, x->zero);
  for (int64_t i = 0; i < TILE * groups; i += LANES) {
    store(x->scale + i, load(x->scale + i) * steps_of(v));
    store(x->zero + i, load(x->zero + i) - load(x->scale + i) * one_of(v));
  }
}

/* For each line that is read, one of the next batch is asked for. */
INLINE void ask(const uint8_t *data, const int64_t *soon, int count, int t, int64_t size) {
  for (int64_t at = 0; at < size && t < count; at += 64) __builtin_prefetch(data + soon[t] * size + at, 0, 2);
}

INLINE void keys_as(const Field *k, const int64_t *token, int count, const int64_t *soon, int more, uint16_t *to,
                    int64_t dim, int64_t bits, int fine) {
  const Line turn = turns(bits);
  const uint8_t *data = k->data, *low = k->low;
  const int64_t size = dim * bits / 8;
  for (int t = 0; t < count; t++) {
    const uint8_t *code = data + token[t] * size, *rest = fine ? low + token[t] * size : code;
    ask(data, soon, more, t, size);
    if (fine) ask(low, soon, more, t, size);
    for (int64_t d = 0; d < dim; d += 32, code += 4 * bits, rest += 4 * bits, to += 32)
      _mm512_store_si512(to, fine ? nibbles(code, rest) : fractions(code, bits, turn));
  }
}

INLINE void values_as(const Field *v, const int64_t *token, int count, const int64_t *soon, int more, uint16_t *to,
                      int64_t dim, int64_t bits, int fine) {
  const Line turn = turns(bits);
  const uint8_t *data = v->data, *low = fine ? v->low : data;
  const int64_t size = dim * bits / 8, last = count - 1;
  for (int t = 0; t < TILE; t += 2, to += 32) { /* beyond the last token, its copies, which have no weight */
    const int64_t at = token[t < last ? t : last] * size, then = token[t + 1 < last ? t + 1 : last] * size;
    const uint8_t *a = data + at, *b = data + then, *c = low + at, *e = low + then;
    for (int i = 0; i < 2; i++) {
      ask(data, soon, more, t + i, size);
      if (fine) ask(low, soon, more, t + i, size);
    }
    for (int64_t d = 0; d < dim; d += 32, a += 4 * bits, b += 4 * bits, c += 4 * bits, e += 4 * bits) {
      const Line first = fine ? nibbles(a, c) : fractions(a, bits, turn);
      const Line second = fine ? nibbles(b, e) : fractions(b, bits, turn);
      _mm512_store_si512(to + d * 32, _mm512_unpacklo_epi16(first, second));
      _mm512_store_si512(to + d * 32 + 512, _mm512_unpackhi_epi16(first, second));
    }
  }
}

/* A constant width lets the loops be unrolled. */
#define READ(name, f, token, count, to)                                                      \
  do {                                                                                       \
    if (f->low) name(f, token, count, soon, more, to, f->dim, 4, 1);                         \
    else if (f->bits == 4 && f->dim == 128) name(f, token, count, soon, more, to, 128, 4, 0); \
    else if (f->bits == 4) name(f, token, count, soon, more, to, f->dim, 4, 0);              \
    else if (f->bits == 8) name(f, token, count, soon, more, to, f->dim, 8, 0);              \
    else name(f, token, count, soon, more, to, f->dim, 2, 0);                                \
  } while (0)

/* scores[n][i] = q[n] . key[i] for `n` keys that were made, by the scaled queries of one group */
void products(const Tiles *x, int which, const uint16_t *made, int n, int64_t rows, int64_t dim, float *scores) {
  float found[TILE][LANES] __attribute__((aligned(64))), turned[4][TILE];
  for (int64_t b = 0; b < rows / 4; b++) {
    const uint16_t *at = made;
    WRITTEN();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t line = 0; line < dim / 32; line++, at += 32) {
      _tile_loadd(4, x->part[which][b][line], 64);
      _tile_loadd(2, at, 2 * dim);
      _tile_dpbf16ps(0, 2, 4);
      if (n <= 16) continue;
      _tile_loadd(3, at + 16 * dim, 2 * dim);
      _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, found, 64);
    if (n > 16) _tile_stored(1, found[16], 64);
    const vf4 add = *(const vf4 *)(x->add[which] + 4 * b);
    for (int i = 0; i < n; i += 4) {
      vf4 y[4];
      for (int j = 0; j < 4; j++) {
        const vf4 *plane = (const vf4 *)found[i + j];
        y[j] = plane[0] + (plane[1] + plane[2]) + add;
      }
      _MM_TRANSPOSE4_PS(y[0], y[1], y[2], y[3]);
      for (int j = 0; j < 4; j++) *(vf4 *)(turned[j] + i) = y[j];
    }
    for (int i = 0; i < 4; i++) memcpy(scores + (4 * b + i) * TILE, turned[i], sizeof(float) * n);
  }
}

/* scores[n][t] = q[n] . key[t] of a batch, in runs of one key group. `soon`: the next batch. */
void tiles_dots(const Field *k, const float *q, int64_t rows, const Tokens *tokens, const Tokens *next, Tiles *x,
                float *scores) {
  if (k->layout == MIXED) {
    tiles_dots_mixed(k, q, rows, tokens, next, x, scores);
    return;
  }
  const int64_t *token = tokens->token, *soon = next->token;
  const int count = tokens->count, more = next->count;
  READ(keys_as, k, token, count, x->made);
  for (int t = 0, n; t < count; t += n) {
    if (token[t] < x->from[0] || token[t] >= x->to[0]) {
      take_group(k, q, rows, token[t] / k->group, steps_of(k), one_of(k), 0, x);
      x->from[0] = token[t] / k->group * k->group;
      x->to[0] = x->from[0] + k->group;
    }
    for (n = 1; t + n < count && token[t + n] >= x->from[0] && token[t + n] < x->to[0];) n++;
    products(x, 0, x->made + t * k->dim, n, rows, k->dim, scores + t);
  }
}

/* out[n] += sum_t p[n][t] value[t] for values that were made, channels in the order of the tiles */
void sums_of(const Tiles *x, const float *p, int64_t rows, int64_t dim, int64_t group, float *out) {
  const int64_t parts = dim / 16, each = group / 16;
  uint16_t high[32]; /* the places of the floats' highest 16 bits */
  for (int i = 0; i < 32; i++) high[i] = (uint16_t)(2 * i + 1);
  const Line odd = _mm512_loadu_si512(high);
  uint16_t weight[8][12][32] __attribute__((aligned(64)));
  float found[16][12][LANES] __attribute__((aligned(64))), add[4][8];
  for (int64_t n = 0; n < rows; n += 4, p += 4 * TILE) {
    for (int64_t g = 0; g < parts / each; g++)
      for (int i = 0; i < 4; i++) {
        const vf a = load(p + i * TILE), b = load(p + i * TILE + LANES);
        add[i][g] = sum(a * load(x->zero + g * TILE) + b * load(x->zero + g * TILE + LANES));
        __m512 first = (__m512)(a * load(x->scale + g * TILE));
        __m512 second = (__m512)(b * load(x->scale + g * TILE + LANES));
        for (int plane = 0; plane < 12; plane += 4, first = rest_of(first), second = rest_of(second))
          _mm512_store_si512(weight[g][plane + i], _mm512_permutex2var_epi16(_mm512_castps_si512(first), odd,
                                                                             _mm512_castps_si512(second)));
      }
    WRITTEN();
    for (int64_t j = 0; j < parts; j++) {
      if (j % each == 0) _tile_loadd(5, weight[j / each], 64);
      _tile_loadd(6, x->made + j * 512, 64);
      _tile_zero(7);
      _tile_dpbf16ps(7, 5, 6);
      _tile_stored(7, found[j], 64);
    }
    for (int64_t j = 0; j < parts; j++)
      for (int i = 0; i < 4; i++) {
        float *to = out + (n + i) * dim + j * 16;
        const vf planes = load(found[j][i]) + (load(found[j][4 + i]) + load(found[j][8 + i]));
        store(to, load(to) + (planes + add[i][j / each]));
      }
  }
}

void tiles_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Tokens *next, Tiles *x,
                 float *out) {
  if (v->layout == MIXED) {
    tiles_weigh_mixed(v, p, rows, tokens, next, x, out);
    return;
  }
  const int64_t *token = tokens->token, *soon = next->token;
  const int count = tokens->count, more = next->count;
  READ(values_as, v, token, count, x->made);
  value_scales(v, token, count, x);
  sums_of(x, p, rows, v->dim, v->group, out);
}

void tiles_unsort(const Field *v, float *out, int64_t rows) {
  for (float *x = out; x < out + rows * v->dim; x += 32) {
    float line[32];
    memcpy(line, x, sizeof line);
    for (int i = 0; i < 32; i++) x[channel_of(order_of(v), i)] = line[place_of(i)];
  }
}
#else
int tiles_fit(const Field *f, int64_t dim, int64_t rows) { return (void)f, (void)dim, (void)rows, 0; }
void tiles_open(const Field *k, const float *q, int64_t rows, Tiles *x) { (void)k, (void)q, (void)rows, (void)x; }
void tiles_close(void) {}
void tiles_dots(const Field *k, const float *q, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                float *scores) {
  (void)k, (void)q, (void)rows, (void)tokens, (void)soon, (void)x, (void)scores;
}
void tiles_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                 float *out) {
  (void)v, (void)p, (void)rows, (void)tokens, (void)soon, (void)x, (void)out;
}
void tiles_unsort(const Field *v, float *out, int64_t rows) { (void)v, (void)out, (void)rows; }
#endif
