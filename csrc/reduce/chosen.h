/* chosen.h - gradients that a script passes to one call, such as clip_grad_norm_: which flats does it pass in full?
 *
 * A call that passes all gradients of a flat once can use known facts about the flat, and act on it later. Any other
 * gradient is handled individually.
 */
#ifndef ZS_CHOSEN_H
#define ZS_CHOSEN_H

#include "unit/unit.h"

/* A flat with gradients in the list. */
typedef struct zs_chosen_flat {
    zs_unit *unit;
    int flat;
    int64_t n;    /* gradients */
    bool twice;   /* one of them is there twice */
    int64_t last; /* index of the last one's parameter: the next is most likely the one behind it */
    bool done;    /* for the caller */
} zs_chosen_flat;

/* Zeroed: empty. */
typedef struct zs_chosen {
    zs_chosen_flat *flats; /* [n]; owned */
    int64_t n, room;
} zs_chosen;

/* Adds a gradient. *at: its flat's index; -1: it is no unit's reduced gradient. */
zs_status zs_chosen_add(zs_chosen *all, const zs_tensor *grad, int64_t *at);

/* Are the gradients in the list those whose squares the flat has? */
bool zs_chosen_is_squared(const zs_chosen_flat *chosen);

/* Does their sum over the ranks show that the gradients in the list, all of the flat's, are finite? */
bool zs_chosen_is_finite(const zs_chosen_flat *chosen);

/* Gives these gradients a pending factor (device/pending.h), not 0, and a new version. False: that is not possible, as
 * the flat's memory holds other gradients too, or has another name in a script. */
bool zs_chosen_scale_later(const zs_chosen_flat *chosen, float factor);

/* Frees the list. */
void zs_chosen_free(zs_chosen *all);

#endif
