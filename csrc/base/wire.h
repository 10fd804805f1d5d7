/* wire.h - how numbers cross hosts. */
#ifndef ZS_WIRE_H
#define ZS_WIRE_H

typedef enum zs_wire {
    ZS_WIRE_EXACT, /* as they are */
    ZS_WIRE_BF16,
    ZS_WIRE_INT8, /* in blocks that share a scale */
} zs_wire;

#endif
