/* update_rules.h - the rules of update.h in the precision ZS_REAL. No include guard: update.h includes it twice.
 *
 * `fused` is a compile-time constant of the loop around: true where the machine has FMA. Without it a multiply-add is
 * two roundings, as in torch there. Both sides of a choice are computed, and flags are of type ZS_REAL: gcc vectorises
 * the loops around only so.
 */

/* a * b + c, in one rounding if `fused`. */
ZS_HD ZS_REAL ZS_NAME(zs_madd)(ZS_REAL a, ZS_REAL b, ZS_REAL c, bool fused)
{
    if (fused) return ZS_FMA(a, b, c);
    ZS_REAL product = a * b;
    return product + c;
}

/* start + weight * (end - start), with torch.lerp's bits: from the nearer end. pull: weight, or if that is not below
 * 0.5, weight - 1, and `from_end` is nonzero. */
ZS_HD ZS_REAL ZS_NAME(zs_lerp)(ZS_REAL pull, ZS_REAL from_end, ZS_REAL start, ZS_REAL end, bool fused)
{
    ZS_REAL from = from_end != 0 ? end : start;
    return ZS_NAME(zs_madd)(pull, end - start, from, fused);
}

/* Constants of an Adam or AdamW step. */
typedef struct ZS_NAME(zs_adam) {
    ZS_REAL sign;       /* -1 to maximize */
    ZS_REAL shrink;     /* parameter's factor: 1 - lr * weight_decay if decoupled, else 1 */
    ZS_REAL l2;         /* parameter's part in the gradient: weight_decay if not decoupled, else 0 */
    ZS_REAL pull;       /* how far exp_avg moves towards the gradient (from the gradient, if `from_grad`) */
    ZS_REAL sq_keep;    /* beta2 */
    ZS_REAL sq_add;     /* 1 - beta2 */
    ZS_REAL correction; /* sqrt(1 - beta2^step) */
    ZS_REAL eps;
    ZS_REAL neg_step;  /* -lr / (1 - beta1^step) */
    ZS_REAL from_grad; /* nonzero to interpolate from the gradient, the nearer end: 1 - beta1 >= 0.5 */
} ZS_NAME(zs_adam);

/* Adam's state of one element. */
typedef struct ZS_NAME(zs_adam_cell) {
    ZS_REAL param, exp_avg, exp_avg_sq;
    ZS_REAL max_exp_avg_sq; /* with amsgrad only */
} ZS_NAME(zs_adam_cell);

/* The constants of step number `step` (1 is the first), computed in double and then rounded, as torch does. */
ZS_HD ZS_NAME(zs_adam) ZS_NAME(zs_adam_at)(const zs_hyper *hyper, double step)
{
    ZS_NAME(zs_adam) k;
    k.sign = hyper->maximize ? -1 : 1;
    k.shrink = (ZS_REAL)(hyper->decoupled ? 1 - hyper->lr * hyper->weight_decay : 1);
    k.l2 = (ZS_REAL)(hyper->decoupled ? 0 : hyper->weight_decay);
    k.pull = (ZS_REAL)(1 - hyper->beta1);
    k.from_grad = (ZS_REAL) !(k.pull < (ZS_REAL)0.5);
    if (k.from_grad != 0) k.pull -= 1;
    k.sq_keep = (ZS_REAL)hyper->beta2;
    k.sq_add = (ZS_REAL)(1 - hyper->beta2);
    k.correction = (ZS_REAL)sqrt(1 - zs_power(hyper->beta2, step));
    k.eps = (ZS_REAL)hyper->eps;
    k.neg_step = (ZS_REAL)(-hyper->lr / (1 - zs_power(hyper->beta1, step)));
    return k;
}

/* Constants with one division less, for zs_adam_step with `folded`: the step is the same but for its rounding. */
ZS_HD ZS_NAME(zs_adam) ZS_NAME(zs_adam_folded)(ZS_NAME(zs_adam) k)
{
    k.eps *= k.correction;
    k.neg_step *= k.correction;
    return k;
}

/* One element's Adam step with gradient `grad`. `amsgrad`, `fused` and `folded` are constants of the loop. */
ZS_HD void ZS_NAME(zs_adam_step)(const ZS_NAME(zs_adam) * k, ZS_NAME(zs_adam_cell) * cell, ZS_REAL grad, bool amsgrad,
                                 bool fused, bool folded)
{
    grad *= k->sign;
    ZS_REAL decayed = ZS_NAME(zs_madd)(k->l2, cell->param, grad, fused);
    grad = k->l2 != 0 ? decayed : grad; /* not always: 0 * inf is NaN */

    cell->exp_avg = ZS_NAME(zs_lerp)(k->pull, k->from_grad, cell->exp_avg, grad, fused);
    ZS_REAL kept = cell->exp_avg_sq * k->sq_keep;
    cell->exp_avg_sq = ZS_NAME(zs_madd)(k->sq_add * grad, grad, kept, fused);

    ZS_REAL second = cell->exp_avg_sq;
    if (amsgrad) { /* the larger; a NaN of either comes through */
        ZS_REAL max = cell->max_exp_avg_sq;
        bool keep = (max >= second) | (max != max);
        cell->max_exp_avg_sq = second = keep ? max : second;
    }
    ZS_REAL root = ZS_SQRT(second);
    ZS_REAL denominator = (folded ? root : root / k->correction) + k->eps;
    ZS_REAL change = k->neg_step * cell->exp_avg / denominator;
    ZS_REAL shrunk = cell->param * k->shrink;
    cell->param = shrunk + change;
}

/* With torch's rounding. */
ZS_HD void ZS_NAME(zs_adam_update)(const ZS_NAME(zs_adam) * k, ZS_NAME(zs_adam_cell) * cell, ZS_REAL grad, bool amsgrad,
                                   bool fused)
{
    ZS_NAME(zs_adam_step)(k, cell, grad, amsgrad, fused, false);
}

/* Constants of an SGD step. */
typedef struct ZS_NAME(zs_sgd) {
    ZS_REAL sign; /* -1 to maximize */
    ZS_REAL l2;   /* weight_decay */
    ZS_REAL momentum;
    ZS_REAL inflow; /* the gradient's part in the momentum: 1 - dampening */
    ZS_REAL neg_lr;
    ZS_REAL nesterov; /* nonzero: look ahead */
    ZS_REAL first;    /* nonzero: the momentum has never been used and becomes the gradient */
} ZS_NAME(zs_sgd);

/* SGD's state of one element. */
typedef struct ZS_NAME(zs_sgd_cell) {
    ZS_REAL param;
    ZS_REAL buffer; /* with momentum only */
} ZS_NAME(zs_sgd_cell);

/* The constants, computed in double and then rounded, as torch does. */
ZS_HD ZS_NAME(zs_sgd) ZS_NAME(zs_sgd_of)(const zs_hyper *hyper, bool first)
{
    ZS_NAME(zs_sgd) k;
    k.sign = hyper->maximize ? -1 : 1;
    k.l2 = (ZS_REAL)hyper->weight_decay;
    k.momentum = (ZS_REAL)hyper->momentum;
    k.inflow = (ZS_REAL)(1 - hyper->dampening);
    k.neg_lr = (ZS_REAL)-hyper->lr;
    k.nesterov = (ZS_REAL)hyper->nesterov;
    k.first = (ZS_REAL)first;
    return k;
}

/* One element's SGD step with gradient `grad`. `momentum` and `fused` are constants of the loop. */
ZS_HD void ZS_NAME(zs_sgd_update)(const ZS_NAME(zs_sgd) * k, ZS_NAME(zs_sgd_cell) * cell, ZS_REAL grad, bool momentum,
                                  bool fused)
{
    grad *= k->sign;
    ZS_REAL decayed = ZS_NAME(zs_madd)(k->l2, cell->param, grad, fused);
    grad = k->l2 != 0 ? decayed : grad; /* not always: 0 * inf is NaN */
    if (momentum) {
        ZS_REAL kept = cell->buffer * k->momentum;
        ZS_REAL mixed = ZS_NAME(zs_madd)(k->inflow, grad, kept, fused);
        cell->buffer = k->first != 0 ? grad : mixed;
        ZS_REAL ahead = ZS_NAME(zs_madd)(k->momentum, cell->buffer, grad, fused);
        grad = k->nesterov != 0 ? ahead : cell->buffer;
    }
    cell->param = ZS_NAME(zs_madd)(k->neg_lr, grad, cell->param, fused);
}
