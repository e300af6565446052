/* What the two files about the matrix unit share. */
#ifndef KVENGINE_TILES_INNER_H
#define KVENGINE_TILES_INNER_H

#include "matrix.h"
#include "tiles.h"

#ifdef MATRIX_UNIT
typedef __m512i Line; /* 32 bfloat16 */

/* Number i of a line holds this channel: the first field of all its words, then the next field. */
INLINE int channel_of(int64_t bits, int i) { return (int)(i % (2 * bits) * (16 / bits) + i / (2 * bits)); }

/* The width whose order of channels a field's lines have: nibbles that refine nibbles are read as bytes. */
INLINE int64_t order_of(const Field *f) { return f->low && f->layout != MIXED ? 8 : f->bits; }

/* How far to the left each word is turned. */
INLINE Line turns(int64_t bits) {
  const int64_t each = 0x0001000100010001;
  if (bits == 2)
    return _mm512_setr_epi64(5 * each, 3 * each, each, 15 * each, 13 * each, 11 * each, 9 * each, 7 * each);
  return _mm512_setr_epi64(3 * each, 3 * each, 15 * each, 15 * each, 11 * each, 11 * each, 7 * each, 7 * each);
}

/* Place in a result of the number that holds the channel `channel_of(bits, i)`. */
INLINE int place_of(int i) { return i % 8 / 4 * 16 + i / 8 * 4 + i % 4; }

void take_group(const Field *k, const float *q, int64_t rows, int64_t group, float steps, float one, int which, Tiles *x);
void products(const Tiles *x, int which, const uint16_t *made, int n, int64_t rows, int64_t dim, float *scores);
void sums_of(const Tiles *x, const float *p, int64_t rows, int64_t dim, int64_t group, float *out);
void tiles_dots_mixed(const Field *k, const float *q, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                      float *scores);
void tiles_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                       float *out);
#endif

#endif
