/* position.h - how far this process has come, for messages. */
#ifndef ZS_POSITION_H
#define ZS_POSITION_H

#include <stdint.h>

typedef struct zs_position {
    const char *pass; /* "forward", "backward"; "": between passes */
    uint64_t steps;   /* of the optimizer, since the model was wrapped */
    char unit[96];    /* the unit that the last or the running pass unsharded last; "": none */
} zs_position;

/* Of the model whose pass runs, or else of the one that trained last. Not exact while another thread runs a pass. With
 * Python's lock, under which units are freed. */
void zs_position_find(zs_position *out);

#endif
