/* cuda_face.c - cuda_kernels.h and the CPU's loops, for ctypes (tests/gpu/test_cuda_*.py).
 *
 * A test gives the same memory to both and compares bits, so this file only makes constants. The image is
 * fake_image.c's, or on a real GPU that of cuda_image.c.
 */
#include "device/cuda_driver.h"
#include "device/cuda_kernels.h"
#include "optim/optim.h"

#include <string.h>

#pragma GCC diagnostic ignored "-Wmissing-prototypes"

/* A run's constants, of one step. */
typedef struct face_job {
    zs_cuda_update_job job;
    zs_run run;
    zs_constants constants;
} face_job;

size_t zs_face_job_bytes(void)
{
    return sizeof(face_job);
}

void zs_face_make(face_job *out, const zs_hyper *hyper, zs_rule rule, double step, bool first)
{
    memset(out, 0, sizeof *out);
    zs_constants *k = &out->constants;
    *k = (zs_constants){.step = step, .first = first, .seed = hyper->seed, .round = hyper->round};
    if (rule == ZS_RULE_ADAM) {
        k->adam_f32 = zs_adam_at_f32(hyper, step);
        k->adam_f64 = zs_adam_at_f64(hyper, step);
    } else {
        k->sgd_f32 = zs_sgd_of_f32(hyper, first);
        k->sgd_f64 = zs_sgd_of_f64(hyper, first);
    }
    out->run.constants = k;
    out->run.dithered = hyper->dithered;
    out->run.factor = 1;
    out->job = (zs_cuda_update_job){.rule = rule, .runs = &out->run, .n_runs = 1};
    out->job.full = rule == ZS_RULE_ADAM ? hyper->amsgrad : hyper->momentum != 0;
}

zs_run *zs_face_run(face_job *face)
{
    return &face->run;
}

zs_cuda_update_job *zs_face_update(face_job *face)
{
    return &face->job;
}

void zs_face_step_on_cpu(face_job *face)
{
    zs_run_loop *loop = zs_run_loop_for(face->job.rule, face->job.full, &face->run);
    const int64_t n = face->run.numel, each = face->run.form == ZS_FORM_PLAIN ? 1 : ZS_GROUP;
    for (int64_t i = 0; i < n; i += each) /* one by one: numbers may pass 2^32 anywhere */
        loop(&face->run, i, i + each < n ? i + each : n);
}

/* Makes the constants on the device, in live->room, where updates read them. Counters are float32. */
zs_status zs_face_make_live(face_job *face, const zs_hyper *hyper, const zs_live *live, void *const *steps,
                            int64_t n_steps, void *stream)
{
    zs_constants_job job = {.rule = face->job.rule, .first = face->constants.first, .hyper = hyper, .live = live};
    job.out = live->room;
    job.steps = steps;
    job.n_steps = n_steps;
    face->job.live = true;
    face->constants.live = live->room;
    face->job.grad_factor = live->grad_factor;
    face->job.found_inf = live->found_inf;
    return zs_cuda_constants_make(&job, stream);
}

zs_status zs_face_side_stream(void **out)
{
    zs_cu_stream stream;
    ZS_TRY(ZS_CU(cuStreamCreateWithPriority, &stream, ZS_CU_STREAM_NON_BLOCKING, 0));
    *out = stream;
    return ZS_OK;
}

zs_status zs_face_wait(void *stream)
{
    return ZS_CU(cuStreamSynchronize, (zs_cu_stream)stream);
}
