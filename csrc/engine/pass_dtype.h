/* pass_dtype.h - of which dtype a pass finds a unit's full parameters: the one to compute with, or (`exact`) their own.
 *
 * The one idea: a forward is exact where a unit is `full_in_eval` and its module is in eval mode (FSDP1's
 * FSDP_USE_FULL_PREC_IN_EVAL), and the backward of a forward is as that was, whatever the module's mode is by then: what autograd
 * has saved are views of the full storage, which would read other numbers from a buffer of another dtype.
 */
#ifndef ZS_PASS_DTYPE_H
#define ZS_PASS_DTYPE_H

#include "unit/home.h"
#include "unit/unit.h"

/* Before the unit's forward. Reshards what is full, or under way, in the other dtype. ZS_ERR_STATE where that is in use: in
 * a forward of the unit that has not ended, or pinned. */
zs_status zs_pass_dtype_forward(zs_unit *unit, bool exact);

/* Before the backward of such a forward, and before a forward that is recomputed in backward; the backward is open. ZS_ERR_STATE
 * if this backward has used the unit in the other dtype; ZS_ERR_UNSUPPORTED if it is exact and gradients would be rounded on
 * their way. */
zs_status zs_pass_dtype_backward(zs_unit *unit, bool exact);

/* A backward begins, which has used no unit yet. */
void zs_pass_dtype_open_backward(zs_home *home);

#endif
