/* Attention to codes of 2 and 4 bits by the matrix unit, where the processor has one and the system lets it be used. */
#ifndef KVENGINE_TILES_H
#define KVENGINE_TILES_H

#include "codes.h"

/* What a task keeps: a batch's keys, then its values, and the queries of the key group that was read last. */
typedef struct {
  uint16_t made[16 * 512] __attribute__((aligned(64))); /* [token, channel]; [16 channels][pair][...] */
  uint16_t part[2][CODED_QUERIES / 4][8][512] __attribute__((aligned(64))); /* queries: [width][rows][32 channels][pair][...] */
  float scale[8 * TILE + LANES], zero[8 * TILE + LANES];                 /* of the values: [group of channels, token] */
  float pairs[CODED_QUERIES * 256], add[2][CODED_QUERIES];               /* unscaled queries; a term of every score */
  float factor[2][256];                                                  /* of a mixed page's channels, for either width */
  int64_t from[2], to[2], page[2];                                       /* the tokens of a width's key group; of `factor` */
} Tiles;

int tiles_fit(const Field *f, int64_t dim, int64_t rows);
void tiles_open(const Field *k, const float *q, int64_t rows, Tiles *x);
void tiles_close(void);
void tiles_dots(const Field *k, const float *q, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                float *scores);
void tiles_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                 float *out);
void tiles_unsort(const Field *v, float *out, int64_t rows);

#endif
