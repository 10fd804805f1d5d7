/* update.cuh - the optimizers' loops: each rule of update.h for each dtype, over flat runs, in one pass.
 *
 * Memory is the limit, so all that a step does to an element happens while it is in registers: the gradient's factor
 * (clipping, loss scale), the rule and the rounding. The arithmetic is the CPU's (optim_cpu.c), from the same headers.
 */
#include "pieces.cuh"

namespace zs {

/* The constants by rule and precision; LIVE: those that another kernel has made, read at each use, as they would
 * take too many registers. */
template <bool LIVE> ZS_DEVICE const zs_adam_f32 &adam_of(const zs_cuda_update_args &args, float)
{
    if constexpr (LIVE) return args.live->f32.adam;
    return args.rule.adam_f32;
}
template <bool LIVE> ZS_DEVICE const zs_adam_f64 &adam_of(const zs_cuda_update_args &args, double)
{
    if constexpr (LIVE) return args.live->f64.adam;
    return args.rule.adam_f64;
}
template <bool LIVE> ZS_DEVICE const zs_sgd_f32 &sgd_of(const zs_cuda_update_args &args, float)
{
    if constexpr (LIVE) return args.live->f32.sgd;
    return args.rule.sgd_f32;
}
template <bool LIVE> ZS_DEVICE const zs_sgd_f64 &sgd_of(const zs_cuda_update_args &args, double)
{
    if constexpr (LIVE) return args.live->f64.sgd;
    return args.rule.sgd_f64;
}
template <bool FULL> ZS_DEVICE void update(const zs_adam_f32 &k, zs_adam_cell_f32 &cell, float grad)
{
    zs_adam_update_f32(&k, &cell, grad, FULL, true);
}
template <bool FULL> ZS_DEVICE void update(const zs_adam_f64 &k, zs_adam_cell_f64 &cell, double grad)
{
    zs_adam_update_f64(&k, &cell, grad, FULL, true);
}
template <bool FULL> ZS_DEVICE void update(const zs_sgd_f32 &k, zs_sgd_cell_f32 &cell, float grad)
{
    zs_sgd_update_f32(&k, &cell, grad, FULL, true);
}
template <bool FULL> ZS_DEVICE void update(const zs_sgd_f64 &k, zs_sgd_cell_f64 &cell, double grad)
{
    zs_sgd_update_f64(&k, &cell, grad, FULL, true);
}

/* bfloat16 that is rounded at random when stored; everything else is rounded to nearest. */
struct Dithered : BF16 {};

/* Rounds a result, given 16 random bits. */
template <class D> ZS_DEVICE typename D::Word put(typename D::Real value, uint32_t)
{
    return D::store(value);
}
/* At random. */
template <> ZS_DEVICE zs_bf16 put<Dithered>(float value, uint32_t noise)
{
    return zs_to_bf16_dithered(value, noise);
}

/* Gradient and noise, which all rules need. */
template <class D> struct Step {
    using Real = typename D::Real;
    const zs_cuda_update_args &args;
    const zs_cuda_piece &piece;
    Real factor;

    ZS_DEVICE Real gradient(typename D::Word word) const
    {
        return args.grad_factor != nullptr ? D::load(word) * factor : D::load(word);
    }

    ZS_DEVICE zs_noise noise(int64_t at) const
    {
        return zs_noise_of(&args.dither, piece.number + static_cast<uint32_t>(at));
    }
};

/* Adam and AdamW; FULL: with amsgrad. */
template <class D, bool FULL, bool LIVE> struct Adam : Step<D> {
    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const zs_cuda_piece &piece = this->piece;
        const Words<D, N> grad = load<D, N, By::STREAM>(piece.grad, at);
        Words<D, N> param = load<D, N, By::STREAM>(piece.param, at);
        Words<D, N> first = load<D, N, By::STREAM>(piece.state[0], at);
        Words<D, N> second = load<D, N, By::STREAM>(piece.state[1], at), max;
        if constexpr (FULL) max = load<D, N, By::STREAM>(piece.state[2], at);
        const auto &k = adam_of<LIVE>(this->args, typename D::Real());
#pragma unroll
        for (int i = 0; i < N; i++) {
            decltype(cell_of(k)) cell = {D::load(param.at[i]), D::load(first.at[i]), D::load(second.at[i]), 0};
            if constexpr (FULL) cell.max_exp_avg_sq = D::load(max.at[i]);
            update<FULL>(k, cell, this->gradient(grad.at[i]));
            const zs_noise noise = this->noise(at + i);
            param.at[i] = put<D>(cell.param, noise.of[0] >> 16);
            first.at[i] = put<D>(cell.exp_avg, noise.of[0] & 0xffffu);
            second.at[i] = put<D>(cell.exp_avg_sq, noise.of[1] >> 16);
            if constexpr (FULL) max.at[i] = put<D>(cell.max_exp_avg_sq, noise.of[1] & 0xffffu);
        }
        store<D, N, By::STREAM>(piece.param, at, param);
        store<D, N, By::STREAM>(piece.state[0], at, first);
        store<D, N, By::STREAM>(piece.state[1], at, second);
        if constexpr (FULL) store<D, N, By::STREAM>(piece.state[2], at, max);
    }

  private:
    static zs_adam_cell_f32 cell_of(const zs_adam_f32 &);
    static zs_adam_cell_f64 cell_of(const zs_adam_f64 &);
};

/* SGD; FULL: with momentum. */
template <class D, bool FULL, bool LIVE> struct Sgd : Step<D> {
    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const zs_cuda_piece &piece = this->piece;
        const Words<D, N> grad = load<D, N, By::STREAM>(piece.grad, at);
        Words<D, N> param = load<D, N, By::STREAM>(piece.param, at), buffer;
        if constexpr (FULL) buffer = load<D, N, By::STREAM>(piece.state[0], at);
        const auto &k = sgd_of<LIVE>(this->args, typename D::Real());
#pragma unroll
        for (int i = 0; i < N; i++) {
            decltype(cell_of(k)) cell = {D::load(param.at[i]), 0};
            if constexpr (FULL) cell.buffer = D::load(buffer.at[i]);
            update<FULL>(k, cell, this->gradient(grad.at[i]));
            const zs_noise noise = this->noise(at + i);
            param.at[i] = put<D>(cell.param, noise.of[0] >> 16);
            if constexpr (FULL) buffer.at[i] = put<D>(cell.buffer, noise.of[0] & 0xffffu);
        }
        store<D, N, By::STREAM>(piece.param, at, param);
        if constexpr (FULL) store<D, N, By::STREAM>(piece.state[0], at, buffer);
    }

  private:
    static zs_sgd_cell_f32 cell_of(const zs_sgd_f32 &);
    static zs_sgd_cell_f64 cell_of(const zs_sgd_f64 &);
};

/* Looks whether there is anything to do, and does it. */
template <class D, class Rule> ZS_DEVICE void step(const zs_cuda_update_args &args)
{
    if (args.found_inf != nullptr && *args.found_inf != 0) return;
    const float factor = args.grad_factor != nullptr ? *args.grad_factor : 1;
    const uint32_t number = piece_number(args);
    const zs_cuda_piece &piece = args.piece[number];
    const zs_cuda_cut cut = {piece.numel, piece.head, piece.packs};
    over<pack_of<D>>(cut, Rule{{args, piece, static_cast<typename D::Real>(factor)}}, thread_in(args, number));
}

/* Blocks on a multiprocessor: constants in memory and a third state need registers. */
template <class D, bool LIVE> constexpr int blocks_for(bool amsgrad)
{
    const int usual = LIVE ? D::BLOCKS - 1 : D::BLOCKS;
    const int most = amsgrad ? (LIVE ? 2 : 3) : usual; /* 3: sm_100 */
    return usual < most ? usual : most;
}

} // namespace zs

#define RULE(work, name, Rule, FULL, LIVE, d, D, amsgrad)                                            \
    ZS_KERNEL(zs_##work##_##name##_##d, zs_cuda_update_args, (zs::blocks_for<zs::D, LIVE>(amsgrad))) \
    {                                                                                                \
        zs::step<zs::D, zs::Rule<zs::D, FULL, LIVE>>(args);                                          \
    }
#define RULES(work, LIVE, d, D)                       \
    RULE(work, adam, Adam, false, LIVE, d, D, false)  \
    RULE(work, amsgrad, Adam, true, LIVE, d, D, true) \
    RULE(work, sgd, Sgd, false, LIVE, d, D, false)    \
    RULE(work, momentum, Sgd, true, LIVE, d, D, false)

RULES(step, false, f32, F32)
RULES(step, false, f64, F64)
RULES(step, false, bf16, BF16)
RULES(step, false, f16, F16)
RULES(step, false, dithered, Dithered)
RULES(live, true, f32, F32)
RULES(live, true, f64, F64)
RULES(live, true, bf16, BF16)
RULES(live, true, f16, F16)

#undef RULE
#undef RULES
