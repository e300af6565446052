/* The codec's inner loops, integer for integer the same as reference.py, which explains them.

   rANS: 32-bit states in [2^16, 2^32), 16-bit words, 12-bit counts, 16 lanes. Token t of a channel belongs to lane
   t mod 16; channels follow one another on the same lanes. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BITS 12
#define TOTAL 4096
#define ESCAPE 255
#define WIDTHS 31
#define CONSTANT 62
#define SUM_SCALE 1024

static inline int zigzag(int v) { return v >= 0 ? 2 * v : -2 * v - 1; }

/* Differences of one channel: mode 1 to the group's first token (which refers to the group before), 2 to the token before. */
static void difference(const int16_t *q, int64_t tokens, int64_t group, int mode, int16_t *d)
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

/* Cheapest class among the nearest width and its neighbours, in both families. */
static int64_t cheapest(const int16_t *d, int64_t tokens, int64_t sum, const int64_t *cost, const int64_t *threshold,
                        int *chosen)
{
    uint32_t count[256] = {0};
    int top = 0;
    for (int64_t t = 0; t < tokens; t++) {
        int v = d[t];
        int code = (v >= -127 && v <= 127) ? zigzag(v) : ESCAPE;
        count[code]++;
        if (code > top) top = code;
    }
    int width = 0;
    while (width < WIDTHS - 1 && sum * SUM_SCALE >= threshold[width] * tokens) width++;
    int64_t best = INT64_MAX;
    for (int family = 0; family < 2; family++)
        for (int w = width > 0 ? width - 1 : 0; w <= width + 1 && w < WIDTHS; w++) {
            const int64_t *row = cost + (family * WIDTHS + w) * 256;
            int64_t bits = 0;
            for (int code = 0; code <= top; code++) bits += count[code] * row[code];
            if (bits < best) { best = bits; *chosen = family * WIDTHS + w; }
        }
    return best;
}

/* Chooses mode and class of every channel, writes codes and escapes. Returns the number of escapes, -1 without memory. */
int64_t kv_choose(const int16_t *q, int64_t channels, int64_t tokens, int64_t group, int modes, const int64_t *cost,
                  const int64_t *threshold, const int16_t *radius, uint8_t *kind, uint8_t *codes, int16_t *escapes)
{
    int16_t *scratch = malloc(2 * sizeof(int16_t) * (size_t)(tokens ? tokens : 1));
    int64_t escaped = 0;
    if (!scratch) return -1;
    for (int64_t c = 0; c < channels; c++) {
        const int16_t *x = q + c * tokens, *kept = x;
        int64_t plain = magnitude(x, tokens);
        if (plain == 0) { kind[c] = CONSTANT; memset(codes + c * tokens, 0, (size_t)tokens); continue; }
        int class = 0, mode = 0;
        int64_t best = cheapest(x, tokens, plain, cost, threshold, &class);
        for (int m = 1; m <= 2; m++) {
            if (!(modes >> m & 1)) continue;
            int16_t *d = scratch + (m - 1) * tokens;
            difference(x, tokens, group, m, d);
            int64_t sum = magnitude(d, tokens);
            if (sum >= plain) continue;
            int other;
            int64_t bits = cheapest(d, tokens, sum, cost, threshold, &other);
            if (bits < best) { best = bits; class = other; mode = m; kept = d; }
        }
        kind[c] = (uint8_t)(mode << 6 | class);
        int limit = radius[class];
        for (int64_t t = 0; t < tokens; t++) {
            int v = kept[t];
            if (v >= -limit && v <= limit) codes[c * tokens + t] = (uint8_t)zigzag(v);
            else { codes[c * tokens + t] = ESCAPE; escapes[escaped++] = (int16_t)v; }
        }
    }
    free(scratch);
    return escaped;
}

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
        for (int64_t t = tokens - 1; t >= 0; t--) {
            uint32_t x = state[t % LANES];
            uint32_t count = f[codes[c * tokens + t]], base = low[codes[c * tokens + t]];
            if (count == 0) return -1;
            if (x >= (uint64_t)count << 20) {
                if (at == 0) return -2;
                words[--at] = (uint16_t)x;
                x >>= 16;
            }
            state[t % LANES] = (x / count << BITS) + x % count + base;
        }
    }
    return room - at;
}

static inline uint32_t step(uint32_t x, const uint32_t *slots, uint8_t *code)
{
    uint32_t s = slots[x & (TOTAL - 1)]; /* count - 1 in the low 12 bits, offset in the count, code on top */
    *code = (uint8_t)(s >> 24);
    return ((s & 0xfff) + 1) * (x >> BITS) + (s >> 12 & 0xfff);
}

/* Undoes kv_rans_encode. Returns 0, or -1 if the words do not fit the codes: too few, too many, or wrong final states. */
int kv_rans_decode(uint8_t *codes, const uint8_t *table, int64_t channels, int64_t tokens, int64_t tables,
                   const uint32_t *slots, const uint32_t *first, const uint16_t *words, int64_t have)
{
    uint32_t state[LANES];
    const uint16_t *next = words, *end = words + have;
    memcpy(state, first, sizeof state);
    for (int64_t c = 0; c < channels; c++) {
        uint8_t *out = codes + c * tokens;
        if (table[c] >= tables) { memset(out, 0, (size_t)tokens); continue; }
        const uint32_t *slot = slots + (int64_t)table[c] * TOTAL;
        int64_t t = 0;
        for (; t + LANES <= tokens && end - next >= LANES; t += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                uint32_t x = step(state[lane], slot, out + t + lane);
                uint32_t more = x << 16 | *next; /* within bounds: a row takes at most LANES words */
                int low = x < 1u << 16;
                state[lane] = low ? more : x;
                next += low;
            }
        for (; t < tokens; t++) {
            uint32_t x = step(state[t % LANES], slot, out + t);
            if (x < 1u << 16) {
                if (next == end) return -1;
                x = x << 16 | *next++;
            }
            state[t % LANES] = x;
        }
    }
    if (next != end) return -1;
    for (int lane = 0; lane < LANES; lane++)
        if (state[lane] != 1u << 16) return -1;
    return 0;
}

static void undo(int16_t *v, int64_t tokens, int64_t group, int mode)
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

/* Codes to numbers: (value + shift + mean) * width, written token-major. Returns the number of escapes used, -1 if there
   are too few, -2 without memory. */
int64_t kv_rebuild(const uint8_t *codes, const uint8_t *kind, const int16_t *mean, const float *width, int64_t heads,
                   int64_t dim, int64_t tokens, int64_t group, const float *shift, const int16_t *escapes, int64_t have,
                   float *out)
{
    int64_t used = 0;
    float value[256];
    int16_t *v = malloc(sizeof(int16_t) * (size_t)(tokens ? tokens : 1));
    if (!v) return -2;
    for (int64_t c = 0; c < heads * dim; c++) {
        const uint8_t *code = codes + c * tokens;
        float *to = out + c / dim * tokens * dim + c % dim;
        float step = width[c / dim], centre = mean[c];
        int class = kind[c] & 63, mode = kind[c] >> 6, escaped = 0;
        if (class == CONSTANT) {
            for (int64_t t = 0; t < tokens; t++) to[t * dim] = centre * step;
            continue;
        }
        if (mode == 0) {
            const float *row = shift + class * 256;
            for (int k = 0; k < 256; k++) value[k] = ((float)(k & 1 ? -(k + 1) / 2 : k / 2) + row[k] + centre) * step;
            for (int64_t t = 0; t < tokens; t++) {
                to[t * dim] = value[code[t]];
                escaped |= code[t] == ESCAPE;
            }
            for (int64_t t = 0; escaped && t < tokens; t++)
                if (code[t] == ESCAPE) {
                    if (used == have) goto short_of_escapes;
                    to[t * dim] = ((float)escapes[used++] + centre) * step;
                }
            continue;
        }
        for (int64_t t = 0; t < tokens; t++) {
            int k = code[t];
            if (k != ESCAPE) v[t] = (int16_t)(k & 1 ? -(k + 1) / 2 : k / 2);
            else if (used == have) goto short_of_escapes;
            else v[t] = escapes[used++];
        }
        undo(v, tokens, group, mode);
        for (int64_t t = 0; t < tokens; t++) to[t * dim] = ((float)v[t] + centre) * step;
    }
    free(v);
    return used;
short_of_escapes:
    free(v);
    return -1;
}
