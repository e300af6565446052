/* Reading stored tokens as floats: dense in three dtypes, and codes with their scales. */
#include "fields.h"

INLINE float scalar(const void *p, int64_t i, int64_t dtype) {
  if (dtype == F32) return ((const float *)p)[i];
  uint16_t x = ((const uint16_t *)p)[i];
  return dtype == BF16 ? bf16_value(x) : f16_value(x);
}

INLINE vf vector(const void *p, int64_t i, int64_t dtype) {
  if (dtype == F32) return load((const float *)p + i);
  return dtype == BF16 ? from_bf16((const uint16_t *)p + i) : from_f16((const uint16_t *)p + i);
}

INLINE void widen(const void *p, int64_t start, int64_t dim, int64_t dtype, float *out) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(out + d, vector(p, start + d, dtype));
  for (; d < dim; d++) out[d] = scalar(p, start + d, dtype);
}

static void read_dense(const Field *f, int64_t row, const int64_t *token, int count, float *tile, int64_t stride,
                       int64_t dtype) {
  for (int i = 0; i < count; i++)
    widen(f->data, row * f->row_stride + token[i] * f->token_stride, f->dim, dtype, tile + i * stride);
}

/* How codes become values: code * scale + zero, then * channel. */
enum { EACH, BLOCKS, ONE }; /* a scale per channel, per LANES channels, or one and a factor per channel */
typedef struct {
  int how;
  const float *scale, *zero, *channel;
} Affine;

/* One token's vector. A vector register's codes are bit fields of the 64 bytes that hold them: pick each lane's 32-bit
   word, shift its field down, mask. Whole registers are written, so `out` must be padded. */
INLINE void unpack(const uint8_t *code, int64_t dim, int bits, int how, const Affine *f, float *out) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t bytes = dim * bits / 8;
  int64_t d = 0;
  for (int64_t at = 0; at < bytes; at += 64) {
    vu words = {0};
    if (bytes - at >= 64) words = *(const vu *)(code + at);
    else if (bytes - at == 32) memcpy(&words, code + at, 32);
    else if (bytes - at == 16) memcpy(&words, code + at, 16);
    else memcpy(&words, code + at, bytes - at);
#pragma GCC unroll 32
    for (int first = 0; first < 512 / bits; first += LANES, d += LANES) {
      if (d >= dim) return;
      vi place = (lane + first) * bits;
      vi field = (vi)(__builtin_shuffle(words, (vu)(place >> 5)) >> (vu)(place & 31)) & ((1 << bits) - 1);
      vf value = __builtin_convertvector(field, vf);
      if (how == EACH) store(out + d, value * load(f->scale + d) + load(f->zero + d));
      else if (how == BLOCKS) store(out + d, value * f->scale[d / LANES] + f->zero[d / LANES]);
      else store(out + d, (value * *f->scale + *f->zero) * load(f->channel + d));
    }
  }
}

INLINE void unpack_as(const uint8_t *code, int64_t dim, int64_t bits, int how, const Affine *f, float *out) {
  switch (bits) { /* constants, so that each loop is specialised */
    case 1: unpack(code, dim, 1, how, f, out); break;
    case 2: unpack(code, dim, 2, how, f, out); break;
    case 4: unpack(code, dim, 4, how, f, out); break;
    default: unpack(code, dim, 8, how, f, out);
  }
}

static void unpack_any(const uint8_t *code, int64_t dim, int64_t bits, const Affine *f, float *out) {
  if (f->how == EACH) unpack_as(code, dim, bits, EACH, f, out);
  else if (f->how == BLOCKS) unpack_as(code, dim, bits, BLOCKS, f, out);
  else unpack_as(code, dim, bits, ONE, f, out);
}

INLINE void recall(const Field *f, Memo *memo, int64_t key) {
  if (memo->key == key) return;
  widen(f->scale, key * f->dim, f->dim, f->dtype, memo->scale);
  widen(f->zero, key * f->dim, f->dim, f->dtype, memo->zero);
  memo->key = key;
}

static void read_per_channel(const Field *f, Memo *memo, int64_t token, float *out) {
  recall(f, memo, token / f->group);
  const Affine affine = {EACH, memo->scale, memo->zero, NULL};
  unpack_any((const uint8_t *)f->data + token * (f->dim * f->bits / 8), f->dim, f->bits, &affine, out);
}

/* A group narrower than a register, or across one: spread its scale over the channels first. */
static void read_uneven(const Field *f, Memo *memo, int64_t token, float *out) {
  int64_t groups = f->dim / f->group;
  for (int64_t d = 0; d < f->dim; d++) {
    memo->scale[d] = scalar(f->scale, token * groups + d / f->group, f->dtype);
    memo->zero[d] = scalar(f->zero, token * groups + d / f->group, f->dtype);
  }
  const Affine affine = {EACH, memo->scale, memo->zero, NULL};
  unpack_any((const uint8_t *)f->data + token * (f->dim * f->bits / 8), f->dim, f->bits, &affine, out);
}

static void read_per_token(const Field *f, Memo *memo, int64_t token, float *out) {
  if (f->group % LANES) {
    read_uneven(f, memo, token, out);
    return;
  }
  int64_t groups = f->dim / f->group;
  float scale[256 / LANES], zero[256 / LANES];
  int64_t block = 0, repeat = f->group / LANES;
  for (int64_t g = 0; g < groups; g++) {
    float s = scalar(f->scale, token * groups + g, f->dtype), z = scalar(f->zero, token * groups + g, f->dtype);
    for (int64_t i = 0; i < repeat; i++, block++) scale[block] = s, zero[block] = z;
  }
  const Affine affine = {BLOCKS, scale, zero, NULL};
  unpack_any((const uint8_t *)f->data + token * (f->dim * f->bits / 8), f->dim, f->bits, &affine, out);
}

static void read_mixed(const Field *f, Memo *memo, int64_t token, float *out) {
  int64_t page = token / f->page, slot = token % f->page, low = slot >= f->salient;
  int64_t bits = low ? f->low_bits : f->bits, each = f->dim * bits / 8;
  int64_t index = low ? page * (f->page - f->salient) + slot - f->salient : page * f->salient + slot;
  const uint8_t *code = (const uint8_t *)(low ? f->low : f->data) + index * each;
  if (!f->per_token) {
    recall(f, memo, page * 2 + low);
    const Affine affine = {EACH, memo->scale, memo->zero, NULL};
    unpack_any(code, f->dim, bits, &affine, out);
    return;
  }
  if (memo->key != page) widen(f->channel, page * f->dim, f->dim, f->dtype, memo->scale);
  memo->key = page;
  float scale = scalar(f->scale, token, f->dtype), zero = scalar(f->zero, token, f->dtype);
  const Affine affine = {ONE, &scale, &zero, memo->scale};
  unpack_any(code, f->dim, bits, &affine, out);
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
  for (int i = 0; i < count; i++) {
    float *out = tile + i * stride;
    if (f->layout == PER_CHANNEL) read_per_channel(f, memo, token[i], out);
    else if (f->layout == PER_TOKEN) read_per_token(f, memo, token[i], out);
    else read_mixed(f, memo, token[i], out);
  }
}
