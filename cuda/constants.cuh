/* constants.cuh - the constants of a step, made where the number of the step and the learning rate lie: on the device.
 *
 * A step that a CUDA graph repeats may have nothing of its number in it, so the host cannot make them. One thread
 * does, by the formulas of update_rules.h, which give the host's bits, and each counts a step.
 */
#include "kernel.cuh"

namespace zs {

/* A float32 or float64. */
ZS_DEVICE double number_at(const void *from, bool wide)
{
    return wide ? *static_cast<const double *>(from) : static_cast<double>(*static_cast<const float *>(from));
}

/* The user's values in the form that the rules need. */
ZS_DEVICE zs_hyper hyper_of(const zs_cuda_constants_args &args)
{
    zs_hyper hyper = {};
    hyper.lr = args.lr != nullptr ? number_at(args.lr, args.lr_wide != 0) : args.hyper[0];
    hyper.weight_decay = args.hyper[1];
    hyper.beta1 = args.hyper[2];
    hyper.beta2 = args.hyper[3];
    hyper.eps = args.hyper[4];
    hyper.momentum = args.hyper[5];
    hyper.dampening = args.hyper[6];
    hyper.decoupled = args.decoupled != 0;
    hyper.amsgrad = args.amsgrad != 0;
    hyper.nesterov = args.nesterov != 0;
    hyper.maximize = args.maximize != 0;
    return hyper;
}

/* Step number `step`. */
ZS_DEVICE void make_constants(const zs_cuda_constants_args &args, double step)
{
    const zs_hyper hyper = hyper_of(args);
    if (args.sgd != 0) {
        args.out->f32.sgd = zs_sgd_of_f32(&hyper, args.first != 0);
        args.out->f64.sgd = zs_sgd_of_f64(&hyper, args.first != 0);
    } else {
        args.out->f32.adam = zs_adam_at_f32(&hyper, step);
        args.out->f64.adam = zs_adam_at_f64(&hyper, step);
    }
}

} // namespace zs

/* A thread for each counter; the first one also makes the constants, from its own counter, before it counts. */
ZS_KERNEL(zs_constants, zs_cuda_constants_args, 1)
{
    const int64_t at = zs::thread_number();
    const bool wide = args.step_wide != 0, counts = at < args.n_steps;
    const double step = counts ? zs::number_at(args.step[at], wide) + 1 : 0;
    if (at == 0 && args.out != nullptr) zs::make_constants(args, step);
    if (!counts || (args.found_inf != nullptr && *args.found_inf != 0)) return;
    if (wide) {
        *static_cast<double *>(args.step[at]) = step;
    } else {
        *static_cast<float *>(args.step[at]) = static_cast<float>(step);
    }
}
