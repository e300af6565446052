/* Reading stored tokens as floats: dense in three dtypes, and codes with their scales. */
#include "fields.h"

INLINE float scalar(const void *p, int64_t i, int64_t dtype) {
  if (dtype == F32) return ((const float *)p)[i];
  uint16_t x = ((const uint16_t *)p)[i];
  return dtype == BF16 ? bf16_value(x) : f16_value(x);
}

INLINE void widen(const void *p, int64_t start, int64_t dim, int64_t dtype, float *out) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(out + d, numbers(p, start + d, dtype));
  for (; d < dim; d++) out[d] = scalar(p, start + d, dtype);
}

void widen_run(const void *p, int64_t start, int64_t n, int64_t dtype, float *out) {
  if (dtype == F32) widen(p, start, n, F32, out);
  else if (dtype == BF16) widen(p, start, n, BF16, out);
  else widen(p, start, n, F16, out);
}

static void read_dense(const Field *f, int64_t row, const int64_t *token, int count, float *tile, int64_t stride,
                       int64_t dtype) {
  for (int i = 0; i < count; i++)
    widen(f->data, row * f->row_stride + token[i] * f->token_stride, f->dim, dtype, tile + i * stride);
}

/* How codes become values: code * scale + zero, then * channel. A scale belongs to a channel; to 2^shift channels of a
   token; or to a token, with a factor per channel. */
enum { EACH, BLOCKS, ONE };

/* One token's vector. A vector register's codes are bit fields of the register that holds them: pick each lane's 32-bit
   word, shift its field down, mask. Whole registers are written, so `out` must be padded. */
INLINE vu wide_load(const uint8_t *p, int64_t bytes) {
#if defined(__AVX512BW__)
  if (bytes < 4 * LANES) return (vu)_mm512_maskz_loadu_epi8((1ull << bytes) - 1, p);
#endif
  vu words = {0};
  if (bytes >= 4 * LANES) words = *(const vu *)p;
  else if (bytes == 2 * LANES) memcpy(&words, p, 2 * LANES);
  else if (bytes == LANES) memcpy(&words, p, LANES);
  else memcpy(&words, p, bytes);
  return words;
}

INLINE void unpack(const uint8_t *restrict code, const uint8_t *restrict fine, int64_t dim, int bits, int how,
                   const float *restrict scale, const float *restrict zero, const float *restrict channel, int shift,
                   float *restrict out) {
  const vi lane = EACH_LANE;
  const int64_t bytes = dim * bits / 8;
  int64_t d = 0;
  for (int64_t at = 0; at < bytes; at += 4 * LANES) {
    vu words = wide_load(code + at, bytes - at), rest = fine ? wide_load(fine + at, bytes - at) : (vu){0};
#pragma GCC unroll 32
    for (int first = 0; first < 32 * LANES / bits; first += LANES, d += LANES) {
      if (d >= dim) return;
      vi place = (lane + first) * bits;
      vi field = (vi)((vu)spread((vf)words, place >> 5) >> (vu)(place & 31)) & ((1 << bits) - 1);
      vf value = __builtin_convertvector(field, vf);
      if (fine) {
        vi lower = (vi)((vu)spread((vf)rest, place >> 5) >> (vu)(place & 31)) & 15;
        value += (__builtin_convertvector(lower, vf) - 8) * 0.0625f;
      }
      if (how == EACH) store(out + d, value * load(scale + d) + load(zero + d));
      else if (how == BLOCKS) store(out + d, value * scale[d >> shift] + zero[d >> shift]);
      else store(out + d, (value * *scale + *zero) * load(channel + d));
    }
  }
}

#define UNPACK(name, how)                                                                                             \
  static void name(const uint8_t *code, const uint8_t *fine, int64_t dim, int64_t bits, const float *scale,           \
                   const float *zero, const float *channel, int shift, float *out) {                                  \
    if (fine) { /* nibbles that refine nibbles */                                                                     \
      unpack(code, fine, dim, 4, how, scale, zero, channel, shift, out);                                              \
      return;                                                                                                         \
    }                                                                                                                 \
    switch (bits) { /* constants, so that each loop is specialised */                                                 \
      case 1: unpack(code, NULL, dim, 1, how, scale, zero, channel, shift, out); break;                               \
      case 2: unpack(code, NULL, dim, 2, how, scale, zero, channel, shift, out); break;                               \
      case 4: unpack(code, NULL, dim, 4, how, scale, zero, channel, shift, out); break;                               \
      default: unpack(code, NULL, dim, 8, how, scale, zero, channel, shift, out);                                     \
    }                                                                                                                 \
  }
UNPACK(unpack_each, EACH)
UNPACK(unpack_blocks, BLOCKS)
UNPACK(unpack_one, ONE)

/* Scales and zeros of the group of tokens [from, to), number `key` in the field, as floats. */
INLINE void recall(const Field *f, Memo *memo, int64_t key, int64_t from, int64_t to) {
  widen(f->scale, key * f->dim, f->dim, f->dtype, memo->scale);
  widen(f->zero, key * f->dim, f->dim, f->dtype, memo->zero);
  memo->from = from;
  memo->to = to;
}

/* The lower nibbles of a token's codes, if there are any. */
INLINE const uint8_t *finer(const Field *f, int64_t token) {
  return f->low ? (const uint8_t *)f->low + token * (f->dim / 2) : NULL;
}

static void read_per_channel(const Field *f, Memo *memo, const int64_t *token, int count, float *tile, int64_t stride) {
  for (int i = 0; i < count; i++) {
    if (token[i] < memo->from || token[i] >= memo->to) {
      int64_t key = token[i] / f->group;
      recall(f, memo, key, key * f->group, (key + 1) * f->group);
    }
    unpack_each((const uint8_t *)f->data + token[i] * (f->dim * f->bits / 8), finer(f, token[i]), f->dim, f->bits, memo->scale, memo->zero,
                NULL, 0, tile + i * stride);
  }
}

/* Groups that are no power of two of at least a register: each scale is written to all its channels first. */
static void read_uneven(const Field *f, Memo *memo, const int64_t *token, int count, float *tile, int64_t stride) {
  const int64_t groups = f->dim / f->group;
  for (int i = 0; i < count; i++) {
    for (int64_t g = 0; g < groups; g++) {
      const float scale = scalar(f->scale, token[i] * groups + g, f->dtype);
      const float zero = scalar(f->zero, token[i] * groups + g, f->dtype);
      for (int64_t d = g * f->group; d < (g + 1) * f->group; d++) memo->scale[d] = scale, memo->zero[d] = zero;
    }
    unpack_each((const uint8_t *)f->data + token[i] * (f->dim * f->bits / 8), finer(f, token[i]), f->dim, f->bits, memo->scale, memo->zero,
                NULL, 0, tile + i * stride);
  }
}

/* The scales of tokens that follow each other are one run of numbers, widened together. */
static void read_per_token(const Field *f, Memo *memo, const int64_t *token, int count, float *tile, int64_t stride) {
  if (f->group % LANES || f->group & (f->group - 1)) {
    read_uneven(f, memo, token, count, tile, stride);
    return;
  }
  const int64_t groups = f->dim / f->group, most = (256 / groups);
  const int shift = __builtin_ctzll(f->group);
  for (int i = 0, run; i < count; i += run) {
    for (run = 1; i + run < count && run < most && token[i + run] == token[i] + run;) run++;
    widen(f->scale, token[i] * groups, run * groups, f->dtype, memo->scale);
    widen(f->zero, token[i] * groups, run * groups, f->dtype, memo->zero);
    for (int j = 0; j < run; j++)
      unpack_blocks((const uint8_t *)f->data + token[i + j] * (f->dim * f->bits / 8), finer(f, token[i + j]), f->dim, f->bits,
                    memo->scale + j * groups, memo->zero + j * groups, NULL, shift, tile + (i + j) * stride);
  }
}

static void read_mixed(const Field *f, Memo *memo, int64_t token, float *out) {
  int64_t page = token / f->page, slot = token % f->page, first = page * f->page;
  const uint8_t *mask = f->mask + page * (f->page / 8);
  int64_t low = !(mask[slot / 8] >> slot % 8 & 1), before = salient_before(mask, slot);
  int64_t bits = low ? f->low_bits : f->bits, each = f->dim * bits / 8;
  int64_t index = low ? page * (f->page - f->salient) + slot - before : page * f->salient + before;
  const uint8_t *code = (const uint8_t *)(low ? f->low : f->data) + index * each;
  const int known = token >= memo->from && token < memo->to;
  if (!f->per_token) {
    if (!known) {
      recall(f, memo, page * 2, first, first + f->page);
      widen(f->scale, (page * 2 + 1) * f->dim, f->dim, f->dtype, memo->low_scale);
      widen(f->zero, (page * 2 + 1) * f->dim, f->dim, f->dtype, memo->low_zero);
    }
    unpack_each(code, NULL, f->dim, bits, low ? memo->low_scale : memo->scale, low ? memo->low_zero : memo->zero, NULL, 0, out);
    return;
  }
  if (!known) widen(f->channel, page * f->dim, f->dim, f->dtype, memo->scale);
  memo->from = first;
  memo->to = first + f->page;
  float scale = scalar(f->scale, token, f->dtype), zero = scalar(f->zero, token, f->dtype);
  unpack_one(code, NULL, f->dim, bits, &scale, &zero, memo->scale, 0, out);
}

void read_tokens(const Field *f, Memo *memo, int64_t row, const int64_t *token, int count, float *tile,
                 int64_t stride) {
  if (f->layout == DENSE) {
    switch (f->dtype) { /* a constant dtype lets each loop be specialised */
      case F32: read_dense(f, row, token, count, tile, stride, F32); break;
      case BF16: read_dense(f, row, token, count, tile, stride, BF16); break;
      default: read_dense(f, row, token, count, tile, stride, F16);
    }
    return;
  }
  if (f->layout == LOWRANK) read_lowrank(f, row, token, count, tile, stride);
  else if (f->layout == PER_CHANNEL) read_per_channel(f, memo, token, count, tile, stride);
  else if (f->layout == PER_TOKEN) read_per_token(f, memo, token, count, tile, stride);
  else if (f->layout == TURNED)
    for (int i = 0; i < count; i++) read_turned(f, token[i], tile + i * stride);
  else
    for (int i = 0; i < count; i++) read_mixed(f, memo, token[i], tile + i * stride);
}

/* Where a token's bytes are, and how many. */
INLINE const char *bytes_of(const Field *f, int64_t row, int64_t token, int64_t *count) {
  const int64_t size = f->dtype == F32 ? 4 : 2;
  if (f->layout == DENSE) {
    *count = f->dim * size;
    return (const char *)f->data + (row * f->row_stride + token * f->token_stride) * size;
  }
  *count = f->dim * f->bits / 8;
  if (f->layout == MIXED) token = token / f->page * f->salient; /* its page's */
  return (const char *)f->data + token * *count;
}

INLINE void fetch_lines(const char *from, int64_t bytes) {
#pragma GCC unroll 8
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* Ask for the tokens' bytes, to be read soon: memory works while other tokens are computed with. */
void fetch_tokens(const Field *f, int64_t row, const int64_t *token, int count) {
  int64_t bytes;
  if (f->layout == LOWRANK) return;
  const char *from = bytes_of(f, row, 0, &bytes);
  const int64_t step = f->layout == DENSE ? f->token_stride * (f->dtype == F32 ? 4 : 2) : bytes;
  for (int i = 0; i < count; i++)
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + token[i] * step + line, 0, 2);
}

void fetch_batch(const Field *f, int64_t row, const Tokens *x) {
  if (x->together && f->layout != LOWRANK && f->layout != DENSE) { /* one run of bytes */
    int64_t bytes;
    const char *const from = bytes_of(f, row, x->token[0], &bytes);
    if (bytes <= 64) { /* more lines, asked for as fast as this, would keep what is needed now waiting */
      fetch_lines(from, x->count * bytes);
      return;
    }
  }
  if (f->layout != MIXED) {
    fetch_tokens(f, row, x->token, x->count);
    return;
  }
  const char *const data = x->narrow ? f->low : f->data;
  const int64_t size = f->dim * (x->narrow ? f->low_bits : f->bits) / 8;
  for (int i = 0; i < x->count; i++)
    for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(data + x->index[i] * size + line, 0, 2);
}

/* Ask for some of the first lines of tokens that follow each other, and for the scales they are read with. */
void fetch_start(const Field *f, int64_t row, int64_t token, int64_t count) {
  int64_t bytes;
  if (f->layout == LOWRANK) return;
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(bytes_of(f, row, token + i, &bytes), 0, 2);
  const int64_t size = f->dtype == F32 ? 4 : 2;
  const char *const scale = f->scale, *const zero = f->zero;
  if (f->layout == PER_CHANNEL) {
    const int64_t each = f->dim * size;
    for (int64_t number = token / f->group; number * f->group < token + count; number++) {
      fetch_lines(scale + number * each, each);
      fetch_lines(zero + number * each, each);
    }
  } else if (f->layout == PER_TOKEN) {
    const int64_t each = f->dim / f->group * size;
    fetch_lines(scale + token * each, count * each);
    fetch_lines(zero + token * each, count * each);
  }
}
