/* From tensors to codes and back, 16 channels at a time, so that memory is read and written by whole cache lines and
   nothing as large as the tensor is kept in between. Strides are in elements; the channels of a token are contiguous. */

#include "coder.h"

static inline float bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static float half_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return bits_float(sign | ((rest << 13) + (112u << 23)));
    return bits_float(sign | float_bits((float)rest * 0x1p-24f));
}

static uint16_t float_half(float x) /* to nearest, ties to even; |x| <= 65504 */
{
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest < 113u << 23) /* subnormal: adding 0.5 rounds at the right bit */
        return (uint16_t)(sign | (float_bits(bits_float(rest) + 0.5f) - float_bits(0.5f)));
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

static uint16_t float_bfloat(float x)
{
    uint32_t bits = float_bits(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* 16 channels (or `many`) of one token to floats. */
static inline void load_row(const void *x, int64_t at, int dtype, int64_t many, float *row)
{
#ifdef ROWS_AT_ONCE
    __mmask16 mask = (__mmask16)((1u << many) - 1);
    __m512 y;
    if (dtype == FLOAT32) y = _mm512_maskz_loadu_ps(mask, (const float *)x + at);
    else {
        __m256i raw = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + at);
        y = dtype == FLOAT16 ? _mm512_cvtph_ps(raw)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    _mm512_storeu_ps(row, y);
#else
    for (int64_t j = 0; j < many; j++)
        row[j] = dtype == FLOAT32   ? ((const float *)x)[at + j]
                 : dtype == FLOAT16 ? half_float(((const uint16_t *)x)[at + j])
                                    : bits_float((uint32_t)((const uint16_t *)x)[at + j] << 16);
#endif
}

/* 16 floats (or `many`) of one token, kept within the type's finite numbers, to the tensor. */
static inline void store_row(void *x, int64_t at, int dtype, int64_t many, float *row)
{
    float most = dtype == FLOAT16 ? 65504.0f : dtype == BFLOAT16 ? 0x1.fep127f : 0x1.fffffep127f;
    for (int j = 0; j < LANES; j++) row[j] = row[j] > most ? most : row[j] < -most ? -most : row[j];
#ifdef ROWS_AT_ONCE
    __mmask16 mask = (__mmask16)((1u << many) - 1);
    __m512 y = _mm512_loadu_ps(row);
    if (dtype == FLOAT32) _mm512_mask_storeu_ps((float *)x + at, mask, y);
    else if (dtype == FLOAT16)
        _mm256_mask_storeu_epi16((uint16_t *)x + at, mask, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    else {
        __m512i bits = _mm512_castps_si512(y);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        _mm256_mask_storeu_epi16((uint16_t *)x + at, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
#else
    for (int64_t j = 0; j < many; j++)
        if (dtype == FLOAT32) ((float *)x)[at + j] = row[j];
        else ((uint16_t *)x)[at + j] = dtype == FLOAT16 ? float_half(row[j]) : float_bfloat(row[j]);
#endif
}

/* Largest magnitude of each head; not finite if any number is not. */
void kv_largest(const void *x, int dtype, int64_t heads, int64_t tokens, int64_t dim, int64_t head_stride,
                int64_t token_stride, float *largest)
{
    for (int64_t h = 0; h < heads; h++) {
        uint32_t top = 0; /* magnitudes order like their bits */
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = h * head_stride + t * token_stride;
            if (dtype == FLOAT32) {
                const uint32_t *row = (const uint32_t *)x + at;
                for (int64_t j = 0; j < dim; j++) top = (row[j] & 0x7fffffff) > top ? row[j] & 0x7fffffff : top;
            } else {
                const uint16_t *row = (const uint16_t *)x + at;
                uint16_t most = 0;
                for (int64_t j = 0; j < dim; j++) most = (row[j] & 0x7fff) > most ? row[j] & 0x7fff : most;
                top = most > top ? most : top;
            }
        }
        largest[h] = dtype == FLOAT32 ? bits_float(top) : dtype == BFLOAT16 ? bits_float(top << 16) : half_float(top);
    }
}

static int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* One channel in steps, its rounded mean taken out. */
static int16_t quantise(const float *x, float width, int64_t tokens, int16_t *q)
{
    int64_t sum = 0;
    for (int64_t t = 0; t < tokens; t++) {
        float s = __builtin_rintf(x[t] / width);
        q[t] = (int16_t)(s > LIMIT ? LIMIT : s < -LIMIT ? -LIMIT : s);
    }
    for (int64_t t = 0; t < tokens; t++) sum += q[t];
    int16_t mean = tokens ? (int16_t)floor_divide(2 * sum + tokens, 2 * tokens) : 0;
    for (int64_t t = 0; t < tokens; t++) q[t] = (int16_t)(q[t] - mean);
    return mean;
}

/* Kinds, means, codes and escapes of a tensor [head token dim]. Returns the number of escapes, -1 without memory. */
int64_t kv_to_codes(const void *x, int dtype, int64_t heads, int64_t tokens, int64_t dim, int64_t head_stride,
                    int64_t token_stride, const float *width, int64_t group, int modes, const int32_t *cost,
                    const int64_t *threshold, const int16_t *radius, uint8_t *kind, int16_t *mean, uint8_t *codes,
                    int16_t *escapes)
{
    int64_t escaped = 0, stride = tokens + 17; /* odd in cache lines: 16 rows then fall into different sets */
    float *block = malloc(sizeof(float) * (size_t)(LANES * stride) + 7 * (size_t)tokens + 8);
    if (!block) return -1;
    int16_t *q = (int16_t *)(block + LANES * stride), *scratch = q + tokens;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t start = 0; start < dim; start += LANES) {
            int64_t many = dim - start < LANES ? dim - start : LANES;
            for (int64_t t = 0; t < tokens; t++) {
                float row[LANES];
                load_row(x, h * head_stride + t * token_stride + start, dtype, many, row);
                for (int64_t j = 0; j < many; j++) block[j * stride + t] = row[j];
            }
            for (int64_t j = 0; j < many; j++) {
                int64_t c = h * dim + start + j;
                mean[c] = quantise(block + j * stride, width[h], tokens, q);
                kind[c] = choose_channel(q, tokens, group, modes, cost, threshold, radius, codes + c * tokens, escapes,
                                         &escaped, scratch);
            }
        }
    free(block);
    return escaped;
}

static inline int unzigzag(int code) { return code & 1 ? -(code + 1) / 2 : code / 2; }

/* One channel's numbers: (value + shift + mean) * width. Returns the number of escapes used, -1 if there are too few. */
static int64_t channel(const uint8_t *code, int kind, float centre, float width, int64_t tokens, int64_t group,
                       const float *shift, const int16_t *escapes, int64_t have, int16_t *v, float *to)
{
    int class = kind & 63, mode = kind >> 6, escaped = 0;
    int64_t used = 0;
    if (class == CONSTANT) {
        for (int64_t t = 0; t < tokens; t++) to[t] = centre * width;
        return 0;
    }
    for (int64_t t = 0; t < tokens; t++) escaped |= code[t] == ESCAPE;
    if (mode == 0) {
        float value[256];
        const float *row = shift + class * 256;
        for (int k = 0; k < 256; k++) value[k] = ((float)unzigzag(k) + row[k] + centre) * width;
        for (int64_t t = 0; t < tokens; t++) to[t] = value[code[t]];
        for (int64_t t = 0; escaped && t < tokens; t++)
            if (code[t] == ESCAPE) {
                if (used == have) return -1;
                to[t] = ((float)escapes[used++] + centre) * width;
            }
        return used;
    }
    for (int64_t t = 0; t < tokens; t++) v[t] = (int16_t)unzigzag(code[t]);
    for (int64_t t = 0; escaped && t < tokens; t++)
        if (code[t] == ESCAPE) {
            if (used == have) return -1;
            v[t] = escapes[used++];
        }
    undo(v, tokens, group, mode);
    for (int64_t t = 0; t < tokens; t++) to[t] = ((float)v[t] + centre) * width;
    return used;
}

/* A section's numbers into a tensor [head token dim]. Returns 0, -1 if words or escapes do not fit, -2 without memory. */
int kv_from_codes(const uint8_t *kind, const int16_t *mean, const float *width, int64_t heads, int64_t tokens, int64_t dim,
                  int64_t group, const uint32_t *slots, const uint32_t *first, const uint16_t *words, int64_t have_words,
                  const float *shift, const int16_t *escapes, int64_t have_escapes, void *out, int dtype,
                  int64_t head_stride, int64_t token_stride)
{
    int64_t used = 0, stride = tokens + 17;
    float *block = calloc(1, sizeof(float) * (size_t)(LANES * stride) + 3 * (size_t)tokens + 8);
    if (!block) return -2;
    int16_t *v = (int16_t *)(block + LANES * stride);
    uint8_t *codes = (uint8_t *)(v + tokens);
    reader from = {.next = words, .end = words + have_words};
    memcpy(from.state, first, sizeof from.state);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t start = 0; start < dim; start += LANES) {
            int64_t many = dim - start < LANES ? dim - start : LANES;
            for (int64_t j = 0; j < many; j++) {
                int64_t c = h * dim + start + j;
                if (kind[c] != CONSTANT && read_channel(&from, slots + (kind[c] & 63) * TOTAL, tokens, codes)) goto bad;
                int64_t took = channel(codes, kind[c], mean[c], width[h], tokens, group, shift, escapes + used,
                                       have_escapes - used, v, block + j * stride);
                if (took < 0) goto bad;
                used += took;
            }
            for (int64_t t = 0; t < tokens; t++) {
                float row[LANES];
                for (int j = 0; j < LANES; j++) row[j] = block[j * stride + t];
                store_row(out, h * head_stride + t * token_stride + start, dtype, many, row);
            }
        }
    free(block);
    return used == have_escapes ? read_done(&from) : -1;
bad:
    free(block);
    return -1;
}

/* Words of a tensor [head token dim] to byte planes [byte head*dim token], low byte first, rotated left by `rotate` bits. */
void kv_split(const void *x, int size, int rotate, int64_t heads, int64_t tokens, int64_t dim, int64_t head_stride,
              int64_t token_stride, uint8_t *planes)
{
    int64_t plane = heads * dim * tokens;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t start = 0; start < dim; start += LANES)
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t d = start; d < dim && d < start + LANES; d++) {
                    int64_t from = h * head_stride + t * token_stride + d, to = (h * dim + d) * tokens + t;
                    if (size == 2) {
                        uint16_t w = ((const uint16_t *)x)[from];
                        w = rotate ? (uint16_t)(w << 1 | w >> 15) : w;
                        planes[to] = (uint8_t)w;
                        planes[plane + to] = (uint8_t)(w >> 8);
                    } else {
                        uint32_t w = ((const uint32_t *)x)[from];
                        w = rotate ? w << 1 | w >> 31 : w;
                        for (int i = 0; i < 4; i++) planes[i * plane + to] = (uint8_t)(w >> 8 * i);
                    }
                }
}

/* 16 channels and 16 tokens of two byte planes to 16-bit words: read along tokens, written along channels. */
static inline void merge_tile(const uint8_t *low, const uint8_t *high, int64_t stride, int rotate, uint16_t *out,
                              int64_t token_stride)
{
    uint16_t tile[LANES][LANES];
    for (int d = 0; d < LANES; d++)
        for (int t = 0; t < LANES; t++) {
            uint16_t w = (uint16_t)(low[d * stride + t] | high[d * stride + t] << 8);
            tile[t][d] = rotate ? (uint16_t)(w >> 1 | w << 15) : w;
        }
    for (int t = 0; t < LANES; t++) memcpy(out + t * token_stride, tile[t], sizeof tile[t]);
}

/* Undoes kv_split. */
void kv_merge(const uint8_t *planes, int size, int rotate, int64_t heads, int64_t tokens, int64_t dim, void *out,
              int64_t head_stride, int64_t token_stride)
{
    int64_t plane = heads * dim * tokens;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t start = 0; start < dim; start += LANES) {
            int64_t first = 0;
            if (size == 2 && start + LANES <= dim)
                for (; first + LANES <= tokens; first += LANES) {
                    const uint8_t *low = planes + (h * dim + start) * tokens + first;
                    uint16_t *to = (uint16_t *)out + h * head_stride + first * token_stride + start;
                    merge_tile(low, low + plane, tokens, rotate, to, token_stride);
                }
            for (int64_t t = first; t < tokens; t++)
                for (int64_t d = start; d < dim && d < start + LANES; d++) {
                    int64_t to = h * head_stride + t * token_stride + d, from = (h * dim + d) * tokens + t;
                    if (size == 2) {
                        uint16_t w = (uint16_t)(planes[from] | planes[plane + from] << 8);
                        ((uint16_t *)out)[to] = rotate ? (uint16_t)(w >> 1 | w << 15) : w;
                    } else {
                        uint32_t w = 0;
                        for (int i = 0; i < 4; i++) w |= (uint32_t)planes[i * plane + from] << 8 * i;
                        ((uint32_t *)out)[to] = rotate ? w >> 1 | w << 31 : w;
                    }
                }
        }
}

/* Each channel's most frequent byte (the smallest of several), taken from all its bytes; counts of what is left. */
void kv_centre(uint8_t *symbols, int64_t channels, int64_t tokens, uint8_t *centre, int64_t *counts)
{
    memset(counts, 0, 256 * sizeof(int64_t));
    for (int64_t c = 0; c < channels; c++) {
        uint32_t count[256] = {0};
        uint8_t *row = symbols + c * tokens;
        int best = 0;
        for (int64_t t = 0; t < tokens; t++) count[row[t]]++;
        for (int k = 1; k < 256; k++) best = count[k] > count[best] ? k : best;
        for (int k = 0; k < 256; k++) counts[(uint8_t)(k - best)] += count[k];
        for (int64_t t = 0; t < tokens; t++) row[t] = (uint8_t)(row[t] - best);
        centre[c] = (uint8_t)best;
    }
}
