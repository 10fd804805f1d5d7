/* optim_disk.c - a run of optim.h some of whose memory lies on a disk.
 *
 * A piece of the parameter and of its state is borrowed (pager.h), the loops run over it, and it is returned; during
 * the work on one piece, the pager reads the next ones and writes the previous ones.
 */
#include "device/device.h"
#include "optim/optim.h"
#include "pager/pager.h"

/* Elements of a run on disk that are in use at a time: enough for the disk's full speed. The last piece takes the rest,
 * if that is not much more. */
enum { PIECE = 2 << 20 };

/* Elements of a run, and a separate run for the place of the work on them. */
typedef struct loan {
    zs_update_job job; /* of `at` */
    zs_run at;
    struct {
        void *memory;
        size_t bytes;
    } lent[ZS_OPTIM_STATES + 1]; /* [n_lent] the parameter, its state */
    int n_lent;
    size_t bytes;     /* of the parameter and of gradients */
    bool wants_grads; /* those are only read, where they lie */
} loan;

static zs_status borrow_one(loan *one, void **where, size_t bytes)
{
    void *memory = *where;
    if (bytes == 0) return ZS_OK;
    ZS_TRY(zs_pager_lend(memory, bytes, where));
    one->lent[one->n_lent].memory = memory;
    one->lent[one->n_lent++].bytes = bytes;
    return ZS_OK;
}

static zs_status borrow(loan *one)
{
    ZS_TRY(borrow_one(one, &one->at.param, one->bytes));
    for (int s = 0; s < ZS_OPTIM_STATES; s++)
        ZS_TRY(borrow_one(one, &one->at.state[s], zs_run_state_bytes(&one->at, s, one->at.numel)));
    ZS_TRY(zs_pager_want(one->at.grad, one->bytes, ZS_PAGER_READ));
    one->wants_grads = true;
    return ZS_OK;
}

static void give_back(const loan *one, bool changed)
{
    for (int i = 0; i < one->n_lent; i++)
        zs_pager_give_back(one->lent[i].memory, one->lent[i].bytes, changed);
    if (one->wants_grads) zs_pager_done(one->at.grad, one->bytes);
}

static void update_loan(void *ctx, int64_t begin, int64_t end)
{
    zs_update_part(&((const loan *)ctx)->job, begin, end);
}

/* Elements [from, from + numel) of a run. */
static zs_status update_piece(const zs_update_job *job, int64_t from, int64_t numel)
{
    size_t size = zs_dtype_size(job->run->dtype), skipped = (size_t)from * size;
    loan one = {.job = *job, .at = *job->run, .bytes = (size_t)numel * size};
    one.job.run = &one.at;
    one.at.param = (char *)one.at.param + skipped;
    one.at.grad = (const char *)one.at.grad + skipped;
    for (int s = 0; s < ZS_OPTIM_STATES; s++)
        if (one.at.state[s] != NULL) one.at.state[s] = (char *)one.at.state[s] + zs_run_state_bytes(job->run, s, from);
    one.at.number += (uint64_t)from;
    one.at.numel = numel;
    zs_status status = borrow(&one);
    if (status == ZS_OK) zs_parallel_for(numel, ZS_UPDATE_GRAIN, update_loan, &one);
    give_back(&one, status == ZS_OK);
    return status;
}

zs_status zs_update_on_disk(const zs_update_job *job)
{
    for (int64_t from = 0, numel; from < job->run->numel; from += numel) {
        numel = job->run->numel - from;
        if (numel > PIECE + PIECE / 2) numel = PIECE;
        ZS_TRY(update_piece(job, from, numel));
    }
    return ZS_OK;
}
