/* Prediction, choice of tables, and rANS: 32-bit states in [2^16, 2^32), 16-bit words, 12-bit counts, 16 lanes. Token t of
   a channel belongs to lane t mod 16; channels follow one another on the same lanes. */

#include "coder.h"

/* Differences of one channel: mode 1 to the group's first token (which refers to the group before), 2 to the token before. */
void difference(const int16_t *q, int64_t tokens, int64_t group, int mode, int16_t *d)
{
    if (mode == 2) {
        d[0] = q[0];
        for (int64_t t = 1; t < tokens; t++) d[t] = (int16_t)(q[t] - q[t - 1]);
        return;
    }
    int16_t before = 0;
    for (int64_t start = 0; start < tokens; start += group) {
        int64_t end = start + group < tokens ? start + group : tokens;
        int16_t anchor = q[start];
        d[start] = (int16_t)(anchor - before);
        for (int64_t t = start + 1; t < end; t++) d[t] = (int16_t)(q[t] - anchor);
        before = anchor;
    }
}

static int64_t magnitude(const int16_t *d, int64_t tokens)
{
    int64_t sum = 0;
    for (int64_t t = 0; t < tokens; t++) sum += d[t] < 0 ? -d[t] : d[t];
    return sum;
}

/* Cheapest class among the nearest width and its neighbours, in both families. `codes` receives the zigzag codes. */
static int64_t cheapest(const int16_t *d, int64_t tokens, int64_t sum, const int32_t *cost, const int64_t *threshold,
                        int *chosen, uint8_t *codes)
{
    uint32_t count[4][256]; /* four, because adding twice in a row to one counter waits for the store */
    int top = 0;
    for (int64_t t = 0; t < tokens; t++) {
        int v = d[t], code = v >= 0 ? 2 * v : -2 * v - 1;
        code = code > ESCAPE ? ESCAPE : code;
        codes[t] = (uint8_t)code;
        top = code > top ? code : top;
    }
    for (int i = 0; i < 4; i++) memset(count[i], 0, sizeof(uint32_t) * (size_t)(top + 1));
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        for (int i = 0; i < 4; i++) count[i][codes[t + i]]++;
    for (; t < tokens; t++) count[0][codes[t]]++;
    for (int code = 0; code <= top; code++) count[0][code] += count[1][code] + count[2][code] + count[3][code];
    int width = 0;
    while (width < WIDTHS - 1 && sum * SUM_SCALE >= threshold[width] * tokens) width++;
    int64_t best = INT64_MAX;
    for (int family = 0; family < 2; family++)
        for (int w = width > 0 ? width - 1 : 0; w <= width + 1 && w < WIDTHS; w++) {
            const int32_t *row = cost + (family * WIDTHS + w) * 256;
            int32_t bits = 0; /* at most 2^14 tokens of 28 bits, times 256 */
            for (int code = 0; code <= top; code++) bits += (int32_t)count[0][code] * row[code];
            if (bits < best) { best = bits; *chosen = family * WIDTHS + w; }
        }
    return best;
}

uint8_t choose_channel(const int16_t *q, int64_t tokens, int64_t group, int modes, const int32_t *cost,
                       const int64_t *threshold, const int16_t *radius, uint8_t *codes, int16_t *escapes,
                       int64_t *escaped, int16_t *scratch)
{
    const int16_t *kept = q;
    uint8_t *trial = (uint8_t *)(scratch + 2 * tokens);
    int64_t plain = magnitude(q, tokens);
    if (plain == 0) { memset(codes, 0, (size_t)tokens); return CONSTANT; }
    int class = 0, mode = 0;
    int64_t best = cheapest(q, tokens, plain, cost, threshold, &class, codes);
    for (int m = 1; m <= 2; m++) {
        if (!(modes >> m & 1)) continue;
        int16_t *d = scratch + (m - 1) * tokens;
        difference(q, tokens, group, m, d);
        int64_t sum = magnitude(d, tokens);
        if (sum >= plain) continue;
        int other;
        int64_t bits = cheapest(d, tokens, sum, cost, threshold, &other, trial);
        if (bits >= best) continue;
        best = bits; class = other; mode = m; kept = d;
        memcpy(codes, trial, (size_t)tokens);
    }
    int last = 2 * radius[class], over = 0;
    for (int64_t t = 0; t < tokens; t++) over |= codes[t] > last;
    for (int64_t t = 0; over && t < tokens; t++)
        if (codes[t] > last) { codes[t] = ESCAPE; escapes[(*escaped)++] = kept[t]; }
    return (uint8_t)(mode << 6 | class);
}

/* Chooses for every channel. Returns the number of escapes, -1 without memory. */
int64_t kv_choose(const int16_t *q, int64_t channels, int64_t tokens, int64_t group, int modes, const int32_t *cost,
                  const int64_t *threshold, const int16_t *radius, uint8_t *kind, uint8_t *codes, int16_t *escapes)
{
    int16_t *scratch = malloc(5 * (size_t)tokens + 1);
    int64_t escaped = 0;
    if (!scratch) return -1;
    for (int64_t c = 0; c < channels; c++)
        kind[c] = choose_channel(q + c * tokens, tokens, group, modes, cost, threshold, radius, codes + c * tokens,
                                 escapes, &escaped, scratch);
    free(scratch);
    return escaped;
}

/* One code; returns where the words now begin, -1 if the code has no count, -2 if there is no room. */
static inline int64_t push(uint32_t *state, const uint16_t *freq, const uint16_t *cum, uint8_t code, uint16_t *words,
                           int64_t at)
{
    uint32_t x = *state, count = freq[code];
    if (count == 0) return -1;
    if (x >= (uint64_t)count << 20) {
        if (at == 0) return -2;
        words[--at] = (uint16_t)x;
        x >>= 16;
    }
    *state = (x / count << BITS) + x % count + cum[code];
    return at;
}

#ifdef ROWS_AT_ONCE
static inline __m512i quotient(__m512i x, __m512i divisor) /* exact: 32-bit operands in doubles */
{
    __m256i high = _mm512_extracti64x4_epi64(x, 1), below = _mm512_extracti64x4_epi64(divisor, 1);
    __m512d a = _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)),
                              _mm512_cvtepu32_pd(_mm512_castsi512_si256(divisor)));
    __m512d b = _mm512_div_pd(_mm512_cvtepu32_pd(high), _mm512_cvtepu32_pd(below));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvttpd_epu32(a)), _mm512_cvttpd_epu32(b), 1);
}

/* One row of 16 codes; returns where the words now begin, or NULL if a code has no count. */
static inline uint16_t *push_row(__m512i *state, const uint8_t *codes, const uint32_t *entry, uint16_t *words)
{
    __m512i e = _mm512_i32gather_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), entry, 4);
    __m512i count = _mm512_and_si512(e, _mm512_set1_epi32(0xffff)), base = _mm512_srli_epi32(e, 16), x = *state;
    if (_mm512_test_epi32_mask(count, count) != 0xffff) return NULL;
    /* x >= count << 20, with count = 4096 never reached */
    __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 20), count);
    int many = __builtin_popcount(full);
    __m256i low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
    words -= many;
    _mm256_mask_storeu_epi16(words, (__mmask16)((1u << many) - 1), low);
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    __m512i q = quotient(x, count), rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, count));
    *state = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, BITS), rest), base);
    return words;
}
#endif

/* Codes every channel whose table is below `tables`. Words are written from the end of `words` (capacity `room`).
   Returns the number of words, -1 if a code has no count, -2 if they do not fit. */
int64_t kv_rans_encode(const uint8_t *codes, const uint8_t *table, int64_t channels, int64_t tokens, int64_t tables,
                       const uint16_t *freq, const uint16_t *cum, uint32_t *state, uint16_t *words, int64_t room)
{
    int64_t at = room;
    for (int lane = 0; lane < LANES; lane++) state[lane] = 1u << 16;
    for (int64_t c = channels - 1; c >= 0; c--) {
        if (table[c] >= tables) continue;
        const uint16_t *f = freq + table[c] * 256, *low = cum + table[c] * 256;
        int64_t t = tokens - 1;
#ifdef ROWS_AT_ONCE
        int64_t whole = tokens / LANES * LANES;
        if (whole && at >= tokens) {
            uint32_t entry[256];
            for (int k = 0; k < 256; k++) entry[k] = (uint32_t)low[k] << 16 | f[k];
            for (; t >= whole; t--) at = push(state + t % LANES, f, low, codes[c * tokens + t], words, at);
            if (at < 0) return -1;
            __m512i x = _mm512_loadu_si512(state);
            uint16_t *end = words + at;
            for (int64_t row = whole - LANES; row >= 0 && end; row -= LANES)
                end = push_row(&x, codes + c * tokens + row, entry, end);
            if (!end) return -1;
            _mm512_storeu_si512(state, x);
            at = end - words;
            continue;
        }
#endif
        for (; t >= 0; t--) {
            at = push(state + t % LANES, f, low, codes[c * tokens + t], words, at);
            if (at < 0) return at;
        }
    }
    return room - at;
}

/* See reference.slot_tables; the counts of a table sum to TOTAL. */
void kv_slots(const uint16_t *freq, int64_t tables, uint32_t *slots)
{
    for (int64_t i = 0; i < tables; i++, freq += 256)
        for (uint32_t code = 0; code < 256; code++) {
            uint32_t count = freq[code], entry = code << 24 | (count - 1);
            for (uint32_t j = 0; j < count; j++) *slots++ = entry | j << 12;
        }
}

static inline uint32_t step(uint32_t x, const uint32_t *slots, uint8_t *code)
{
    uint32_t s = slots[x & (TOTAL - 1)]; /* count - 1 in the low 12 bits, offset in the count, code on top */
    *code = (uint8_t)(s >> 24);
    return ((s & 0xfff) + 1) * (x >> BITS) + (s >> 12 & 0xfff);
}

int read_channel(reader *from, const uint32_t *slot, int64_t tokens, uint8_t *out)
{
    uint32_t *state = from->state;
    const uint16_t *next = from->next, *end = from->end;
    int64_t t = 0;
#ifdef ROWS_AT_ONCE
    __m512i x = _mm512_loadu_si512(state);
    for (; t + LANES <= tokens && end - next >= LANES; t += LANES) {
        __m512i s = _mm512_i32gather_epi32(_mm512_and_si512(x, _mm512_set1_epi32(TOTAL - 1)), slot, 4);
        _mm_storeu_si128((__m128i *)(out + t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(s, 24)));
        __m512i count = _mm512_add_epi32(_mm512_and_si512(s, _mm512_set1_epi32(0xfff)), _mm512_set1_epi32(1));
        __m512i offset = _mm512_and_si512(_mm512_srli_epi32(s, 12), _mm512_set1_epi32(0xfff));
        x = _mm512_add_epi32(_mm512_mullo_epi32(count, _mm512_srli_epi32(x, BITS)), offset);
        __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(1 << 16));
        __m512i more = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)next));
        more = _mm512_maskz_expand_epi32(low, more);
        x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), more);
        next += __builtin_popcount(low);
    }
    _mm512_storeu_si512(state, x);
#else
    for (; t + LANES <= tokens && end - next >= LANES; t += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t x = step(state[lane], slot, out + t + lane);
            uint32_t more = x << 16 | *next; /* within bounds: a row takes at most LANES words */
            int low = x < 1u << 16;
            state[lane] = low ? more : x;
            next += low;
        }
#endif
    for (; t < tokens; t++) {
        uint32_t x = step(state[t % LANES], slot, out + t);
        if (x < 1u << 16) {
            if (next == end) return -1;
            x = x << 16 | *next++;
        }
        state[t % LANES] = x;
    }
    from->next = next;
    return 0;
}

int read_done(const reader *from)
{
    for (int lane = 0; lane < LANES; lane++)
        if (from->state[lane] != 1u << 16) return -1;
    return from->next == from->end ? 0 : -1;
}

/* Undoes kv_rans_encode. Returns 0, or -1 if the words do not fit the codes: too few, too many, or wrong final states. */
int kv_rans_decode(uint8_t *codes, const uint8_t *table, int64_t channels, int64_t tokens, int64_t tables,
                   const uint32_t *slots, const uint32_t *first, const uint16_t *words, int64_t have)
{
    reader from = {.next = words, .end = words + have};
    memcpy(from.state, first, sizeof from.state);
    for (int64_t c = 0; c < channels; c++) {
        uint8_t *out = codes + c * tokens;
        if (table[c] >= tables) memset(out, 0, (size_t)tokens);
        else if (read_channel(&from, slots + (int64_t)table[c] * TOTAL, tokens, out)) return -1;
    }
    return read_done(&from);
}

void undo(int16_t *v, int64_t tokens, int64_t group, int mode)
{
    if (mode == 2) {
        for (int64_t t = 1; t < tokens; t++) v[t] = (int16_t)(v[t] + v[t - 1]);
        return;
    }
    int16_t anchor = 0;
    for (int64_t start = 0; start < tokens; start += group) {
        int64_t end = start + group < tokens ? start + group : tokens;
        anchor = v[start] = (int16_t)(v[start] + anchor);
        for (int64_t t = start + 1; t < end; t++) v[t] = (int16_t)(v[t] + anchor);
    }
}
