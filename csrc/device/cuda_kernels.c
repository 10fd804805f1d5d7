/* cuda_kernels.c - see cuda_kernels.h.
 *
 * A job becomes an argument struct (cuda_args.h), a kernel's number and a count of threads; all launches go
 * through one function. Each number has one name, made by the same rule as the kernels' own.
 */
#include "device/cuda_kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_driver.h"
#include "device/cuda_image.h"
#include "device/cuda_launch.h"

/* On every GPU, a norm takes at most so many threads of at least so many elements; each fold leaves a 64th. */
enum { NORM_THREADS = 1 << 17, NORM_EACH = 4 * ZS_CUDA_NORM_PACK, FOLD_BY = 64 };

static struct {
    pthread_mutex_t lock;
    atomic_bool ready;
    zs_cu_kernel of[ZS_KERNEL_COUNT];
    char name[ZS_KERNEL_COUNT][40];
    bool sync; /* ZSHARD_SYNC */
} kernels = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- loading ------------------------------------------------------------------------------------------------------ */

static void name_kernels(void)
{
    static const char *const dtype[ZS_CUDA_KINDS] = {
        [ZS_F32] = "f32", [ZS_F64] = "f64", [ZS_BF16] = "bf16", [ZS_F16] = "f16", [ZS_CUDA_DITHERED] = "dithered"};
    static const char *const rule[ZS_CUDA_RULES] = {"adam", "amsgrad", "sgd", "momentum"};
    size_t size = sizeof kernels.name[0];
    for (int to = 0; to < ZS_CUDA_DTYPES; to++) {
        for (int from = 0; from < ZS_CUDA_DTYPES; from++) {
            snprintf(kernels.name[ZS_KERNEL_SUM + ZS_CUDA_DTYPES * to + from], size, "zs_sum_%s_%s", dtype[from],
                     dtype[to]);
            snprintf(kernels.name[ZS_KERNEL_CAST + ZS_CUDA_DTYPES * to + from], size, "zs_cast_%s_%s", dtype[from],
                     dtype[to]);
        }
        snprintf(kernels.name[ZS_KERNEL_SCALE + to], size, "zs_scale_%s", dtype[to]);
        snprintf(kernels.name[ZS_KERNEL_NORM + to], size, "zs_norm_%s", dtype[to]);
    }
    snprintf(kernels.name[ZS_KERNEL_ENCODE], size, "zs_encode");
    snprintf(kernels.name[ZS_KERNEL_FOLD], size, "zs_fold");
    snprintf(kernels.name[ZS_KERNEL_DIFFERS], size, "zs_differs");
    snprintf(kernels.name[ZS_KERNEL_CONSTANTS], size, "zs_constants");
    for (int r = 0; r < ZS_CUDA_RULES; r++) {
        snprintf(kernels.name[ZS_KERNEL_COMPACT + r], size, "zs_compact_%s", r == 1 ? rule[0] : rule[r]);
        for (int kind = 0; kind < ZS_CUDA_KINDS; kind++)
            snprintf(kernels.name[ZS_KERNEL_STEP + ZS_CUDA_KINDS * r + kind], size, "zs_step_%s_%s", rule[r],
                     dtype[kind]);
    }
    for (int r = 0; r < ZS_CUDA_RULES; r++)
        for (int d = 0; d < ZS_CUDA_DTYPES; d++)
            snprintf(kernels.name[ZS_KERNEL_LIVE + ZS_CUDA_DTYPES * r + d], size, "zs_live_%s_%s", rule[r], dtype[d]);
}

/* Loads the image, saying what to do where it is for other GPUs or drivers. */
static zs_status load_image(zs_cu_library *library)
{
    const void *image = zs_cuda_image();
    zs_cuda_info info;
    ZS_TRY(zs_cuda_alive());
    /* Without an image the driver is handed PTX that it refuses; the tests' fake accepts it, and has its own kernels.
     */
    const void *code = image != NULL ? image : "// no kernels\n";
    zs_cu_result result = zs_cuda_table()->cuLibraryLoadData(library, code, NULL, NULL, 0, NULL, NULL, 0);
    if (image == NULL && result != ZS_CU_SUCCESS)
        return ZS_FAIL(ZS_ERR_CUDA, "zshard was built without CUDA kernels: rebuild it with `make build CUDA=1` or "
                                    "`ZSHARD_CUDA=1 pip install --no-build-isolation .` (needs nvcc)");
    if (result != ZS_CU_ERROR_NO_BINARY_FOR_GPU && result != ZS_CU_ERROR_UNSUPPORTED_PTX_VERSION)
        return zs_cuda_check("cuLibraryLoadData", result);
    zs_cuda_describe(&info);
    int built = zs_cuda_image_version();
    return ZS_FAIL(ZS_ERR_CUDA,
                   "zshard's kernels (%s, built with CUDA %d.%d) do not support this GPU or its driver (CUDA %d.%d): "
                   "update the driver, or rebuild zshard with an nvcc of the driver's CUDA version",
                   zs_cuda_image_targets(), built / 1000, built % 1000 / 10, info.version / 1000,
                   info.version % 1000 / 10);
}

/* Finds every kernel and makes it resident: a kernel loaded at its first launch may wait for the device, which may wait
 * for a peer, which waits for that launch. */
static zs_status find_kernels(zs_cu_library library)
{
    for (int i = 0; i < ZS_KERNEL_COUNT; i++) {
        zs_cu_function function;
        ZS_TRY(zs_cuda_check(kernels.name[i],
                             zs_cuda_table()->cuLibraryGetKernel(&kernels.of[i], library, kernels.name[i])));
        ZS_TRY(ZS_CU(cuKernelGetFunction, &function, kernels.of[i]));
        if (zs_cuda_table()->cuFuncLoad != NULL) ZS_TRY(ZS_CU(cuFuncLoad, function));
    }
    return ZS_OK;
}

static zs_status load_kernels(void)
{
    zs_cu_library library = NULL;
    const char *sync = getenv("ZSHARD_SYNC");
    name_kernels();
    ZS_TRY(zs_cuda_load());
    ZS_TRY(load_image(&library));
    zs_status status = find_kernels(library);
    if (status != ZS_OK) {
        ZS_CU_FREE(cuLibraryUnload, library);
        return status;
    }
    kernels.sync = sync != NULL && sync[0] != '\0' && strcmp(sync, "0") != 0;
    atomic_store_explicit(&kernels.ready, true, memory_order_release);
    return ZS_OK;
}

zs_status zs_cuda_kernels_load(void)
{
    if (atomic_load_explicit(&kernels.ready, memory_order_acquire)) return ZS_OK;
    (void)pthread_mutex_lock(&kernels.lock);
    zs_status status = atomic_load(&kernels.ready) ? ZS_OK : load_kernels();
    (void)pthread_mutex_unlock(&kernels.lock);
    return status;
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

zs_status zs_cuda_launch(int kernel, int64_t blocks, void *args, void *stream)
{
    void *parameters[] = {args};
    ZS_TRY(zs_cuda_kernels_load());
    ZS_TRY(zs_cuda_alive());
    zs_cu_result result =
        zs_cuda_table()->cuLaunchKernel((zs_cu_function)kernels.of[kernel], (unsigned)blocks, 1, 1, ZS_CUDA_BLOCK, 1, 1,
                                        0, (zs_cu_stream)stream, parameters, NULL);
    if (result == ZS_CU_SUCCESS && kernels.sync) result = zs_cuda_table()->cuStreamSynchronize((zs_cu_stream)stream);
    return zs_cuda_check(kernels.name[kernel], result);
}

int64_t zs_cuda_blocks_for(const zs_cuda_cut *cut, int64_t pack)
{
    int64_t single = cut->numel - cut->packs * pack;
    int64_t threads = cut->packs > single ? cut->packs : single;
    return (threads + ZS_CUDA_BLOCK - 1) / ZS_CUDA_BLOCK;
}

static zs_status launch(int kernel, const zs_cuda_cut *cut, int64_t pack, void *args, void *stream)
{
    return zs_cuda_launch(kernel, zs_cuda_blocks_for(cut, pack), args, stream);
}

/* May a pack that begins there be accessed at once? */
static bool aligned_at(const zs_cuda_array *one, int64_t element, int64_t pack)
{
    size_t bytes = (size_t)pack * one->item;
    return one->at == NULL || ((uintptr_t)one->at + (size_t)element * one->item) % bytes == 0;
}

int64_t zs_cuda_pack_of(size_t item)
{
    return ZS_CUDA_QUAD / (int64_t)item;
}

static size_t wider(size_t a, size_t b)
{
    return a > b ? a : b;
}

zs_cuda_cut zs_cuda_cut_of(const zs_cuda_array *arrays, int n, int64_t numel, int64_t pack)
{
    for (int64_t head = 0; head < pack && head + pack <= numel; head++) {
        bool all = true;
        for (int i = 0; all && i < n; i++)
            all = aligned_at(&arrays[i], head, pack);
        if (all) return (zs_cuda_cut){.numel = numel, .head = head, .packs = (numel - head) / pack};
    }
    return (zs_cuda_cut){.numel = numel, .head = numel, .packs = 0};
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* The next rank from `r` on that brings something; world: none. */
static int next_source(const zs_sum *sum, int r)
{
    while (r < sum->world && sum->src[r] == NULL)
        r++;
    return r;
}

static void mark_absent(const zs_sum *sum, zs_cuda_sum_args *args)
{
    for (int r = 0; r < sum->world; r++)
        if (sum->src[r] == NULL) args->absent[r / 64] |= UINT64_C(1) << (r % 64);
}

/* Finds the stride of equally spaced sources; ZS_ERR_UNSUPPORTED if they are not. Two sources give the stride; rank 0
 * may be none of them, so `base` may be an address that is never read. */
static zs_status find_stride(const zs_sum *sum, zs_cuda_sum_args *args)
{
    if (sum->world > ZS_CUDA_SPACED)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "cannot sum %d sources on a GPU: at most %d", sum->world, ZS_CUDA_SPACED);
    const intptr_t *src = (const intptr_t *)(const void *)sum->src;
    int first = next_source(sum, 0), second = next_source(sum, first + 1);
    if (second < sum->world) args->stride = (src[second] - src[first]) / (second - first);
    args->base = first < sum->world ? (const void *)(src[first] - first * args->stride) : sum->dst; /* NOLINT */
    mark_absent(sum, args);
    for (int r = first; r < sum->world; r++)
        if (sum->src[r] != NULL && src[r] != (intptr_t)args->base + r * args->stride)
            return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                           "cannot sum %d sources on a GPU: more than %d must be equally spaced in memory, and that of "
                           "rank %d is not",
                           sum->world, ZS_CUDA_SOURCES, r);
    return ZS_OK;
}

zs_status zs_cuda_sum(const zs_sum *sum, void *stream)
{
    if (sum->numel <= 0) return ZS_OK;
    zs_cuda_sum_args args = {.dst = sum->dst, .scale = sum->scale, .world = sum->world, .accumulate = sum->accumulate};
    zs_cuda_array arrays[1 + ZS_CUDA_SOURCES] = {{sum->dst, zs_dtype_size(sum->to)}};
    size_t item = zs_dtype_size(sum->dtype);
    int n = 1;
    if (sum->world <= ZS_CUDA_SOURCES) {
        for (int r = 0; r < sum->world; r++)
            arrays[n++] = (zs_cuda_array){args.src[r] = sum->src[r], item};
    } else {
        ZS_TRY(find_stride(sum, &args));
        arrays[n++] = (zs_cuda_array){args.base, item};
        arrays[n++] = (zs_cuda_array){(const char *)args.base + args.stride, item};
    }
    const int64_t pack = zs_cuda_pack_of(wider(item, arrays[0].item));
    args.cut = zs_cuda_cut_of(arrays, n, sum->numel, pack);
    return launch(ZS_KERNEL_SUM + ZS_CUDA_DTYPES * (int)sum->to + (int)sum->dtype, &args.cut, pack, &args, stream);
}

/* --- casts, scaling, comparing ------------------------------------------------------------------------------------ */

zs_status zs_cuda_cast(const zs_cast *cast, bool add, void *stream)
{
    if (cast->numel <= 0) return ZS_OK;
    zs_cuda_cast_args args = {.dst = cast->dst, .src = cast->src, .add = add};
    const zs_cuda_array arrays[] = {{cast->dst, zs_dtype_size(cast->to)}, {cast->src, zs_dtype_size(cast->from)}};
    const int64_t pack = zs_cuda_pack_of(wider(arrays[0].item, arrays[1].item));
    args.cut = zs_cuda_cut_of(arrays, 2, cast->numel, pack);
    return launch(ZS_KERNEL_CAST + ZS_CUDA_DTYPES * (int)cast->to + (int)cast->from, &args.cut, pack, &args, stream);
}

zs_status zs_cuda_scale(const zs_numbers *x, double factor, const float *device_factor, void *stream)
{
    if (x->numel <= 0) return ZS_OK;
    zs_cuda_scale_args args = {.x = x->data, .device_factor = device_factor, .factor = factor};
    const zs_cuda_array arrays[] = {{x->data, zs_dtype_size(x->dtype)}};
    const int64_t pack = zs_cuda_pack_of(arrays[0].item);
    args.cut = zs_cuda_cut_of(arrays, 1, x->numel, pack);
    return launch(ZS_KERNEL_SCALE + (int)x->dtype, &args.cut, pack, &args, stream);
}

zs_status zs_cuda_differs(const void *a, const void *b, size_t bytes, uint32_t *flag, void *stream)
{
    if (bytes == 0) return ZS_OK;
    zs_cuda_differs_args args = {.a = a, .b = b, .flag = flag};
    const zs_cuda_array arrays[] = {{a, 1}, {b, 1}};
    args.cut = zs_cuda_cut_of(arrays, 2, (int64_t)bytes, zs_cuda_pack_of(1));
    return launch(ZS_KERNEL_DIFFERS, &args.cut, zs_cuda_pack_of(1), &args, stream);
}

/* --- wire codes --------------------------------------------------------------------------------------------------- */

zs_status zs_cuda_encode(const float *values, float *lost, int64_t numel, void *codes, void *stream)
{
    if (numel <= 0) return ZS_OK;
    zs_cuda_encode_args args = {.values = values, .lost = lost, .codes = codes};
    const zs_cuda_array arrays[] = {{values, sizeof *values}, {lost, sizeof *lost}, {codes, sizeof(zs_bf16)}};
    const int64_t pack = zs_cuda_pack_of(sizeof *values);
    args.cut = zs_cuda_cut_of(arrays, 3, numel, pack);
    return launch(ZS_KERNEL_ENCODE, &args.cut, pack, &args, stream);
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

static zs_status kind_of(double p, uint32_t *kind)
{
    if (p != 1 && p != 2 && !isinf(p)) return ZS_FAIL(ZS_ERR_VALUE, "p must be 1, 2 or inf, got %g", p);
    *kind = isinf(p) ? ZS_CUDA_MAX : p == 1 ? ZS_CUDA_ABS : ZS_CUDA_SQUARE;
    return ZS_OK;
}

/* One level of adding up: `n_out` doubles from `n_in`. */
static zs_status fold(zs_cuda_fold_args args, void *stream)
{
    int64_t blocks = (args.n_out + ZS_CUDA_BLOCK - 1) / ZS_CUDA_BLOCK;
    return zs_cuda_launch(ZS_KERNEL_FOLD, blocks, &args, stream);
}

/* An array without elements has the norm 0. */
static zs_status no_norm(double *result, void *stream)
{
    return ZS_CU(cuMemsetD8Async, (zs_cu_ptr)(uintptr_t)result, 0, sizeof *result, (zs_cu_stream)stream);
}

zs_status zs_cuda_norm(const zs_cuda_norm_job *job, void *stream)
{
    const zs_numbers *x = &job->x;
    zs_cuda_norm_args args = {.x = x->data, .partial = job->scratch, .numel = x->numel};
    ZS_TRY(kind_of(job->p, &args.kind));
    ZS_TRY(zs_cuda_kernels_load());
    if (x->numel <= 0) return no_norm(job->result, stream);
    args.aligned = (uintptr_t)x->data % ZS_CUDA_QUAD == 0;
    int64_t threads = (x->numel + NORM_EACH - 1) / NORM_EACH;
    threads = threads < NORM_THREADS ? threads : NORM_THREADS;
    int64_t blocks = (threads + ZS_CUDA_BLOCK - 1) / ZS_CUDA_BLOCK;
    ZS_TRY(zs_cuda_launch(ZS_KERNEL_NORM + (int)x->dtype, blocks, &args, stream));

    zs_cuda_fold_args level = {.in = job->scratch, .n_in = blocks * ZS_CUDA_BLOCK, .kind = args.kind};
    double *room = job->scratch + level.n_in;
    for (; level.n_in > 1; level.n_in = level.n_out) {
        level.n_out = (level.n_in + FOLD_BY - 1) / FOLD_BY;
        level.out = level.n_out > 1 ? room : job->result;
        ZS_TRY(fold(level, stream));
        level.in = level.out;
        room += level.n_out;
    }
    return ZS_OK;
}

zs_status zs_cuda_norm_join(const double *values, int64_t n, double p, double *result, void *stream)
{
    zs_cuda_fold_args args = {.in = values, .out = result, .n_in = n, .n_out = 1};
    ZS_TRY(kind_of(p, &args.kind));
    ZS_TRY(zs_cuda_kernels_load());
    return n > 0 ? fold(args, stream) : no_norm(result, stream);
}
