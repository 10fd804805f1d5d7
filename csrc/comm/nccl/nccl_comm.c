/* nccl_comm.c - see nccl_comm.h: creation and end.
 *
 * The ranks agree before they create a communicator, and exchange the result afterwards: it is created on all ranks,
 * or on none. */
#include "comm/nccl/nccl_local.h"

#include "base/file.h"
#include "comm/comm_local.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double last_patience = 10.0; /* seconds for outstanding work when the communicator is freed */

enum { MAX_CTAS = 64 }; /* NCCL's own limit */

/* --- agreement of the ranks --------------------------------------------------------------------------------------- */

/* Each rank's message before NCCL is called. */
typedef struct card {
    zs_nccl_id id;          /* of rank 0 */
    int32_t status, result; /* the result here */
    int32_t version, ctas, min_ctas, max_ctas;
    char why[256]; /* if status is not ZS_OK */
} card;

/* Moves this thread's failure to the card: it is reported once all ranks have it. */
static void put_failure(card *own, const zs_nccl_comm *comm, zs_status status)
{
    own->result = comm->result;
    own->status = (int32_t)status;
    snprintf(own->why, sizeof own->why, "%s", zs_last_message());
    zs_clear_error();
}

/* A rank whose wait failed knows less than the rank that it waited for. */
static int weight(const card *of)
{
    if (of->status == ZS_OK) return 0;
    bool waited = of->status == ZS_ERR_TIMEOUT || of->status == ZS_ERR_PEER || of->result == ZS_NCCL_REMOTE_ERROR;
    if (waited) return 1;
    return of->result == ZS_NCCL_SYSTEM_ERROR ? 2 : 3; /* perhaps a closed connection */
}

/* All ranks' cards; fails on all ranks if one could not proceed. *new* array. */
static zs_status exchange_cards(zs_comm *control, const card *own, card **out)
{
    card *all = calloc((size_t)control->world, sizeof *all);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the options of %d ranks", control->world);
    zs_status status = zs_comm_exchange(control, own, sizeof *own, all);
    int worst = 0;
    for (int r = 1; r < control->world && status == ZS_OK; r++)
        if (weight(&all[r]) > weight(&all[worst])) worst = r;
    if (status == ZS_OK && all[worst].status != ZS_OK)
        status = ZS_FAIL((zs_status)all[worst].status, "rank %d: %s", worst, all[worst].why);
    *out = status == ZS_OK ? all : NULL;
    if (status != ZS_OK) free(all);
    return status;
}

static zs_status check_cards(const card *all, int world)
{
    for (int r = 1; r < world; r++) {
        const card *a = &all[0], *b = &all[r];
        char first[16], other[16];
        zs_nccl_version_text(a->version, first, sizeof first);
        zs_nccl_version_text(b->version, other, sizeof other);
        if (a->version != b->version)
            return ZS_FAIL(ZS_ERR_DIVERGED,
                           "NCCL is %s on rank 0, but %s on rank %d: install the same version on all ranks", first,
                           other, r);
        if (a->ctas != b->ctas || a->min_ctas != b->min_ctas || a->max_ctas != b->max_ctas)
            return ZS_FAIL(ZS_ERR_DIVERGED,
                           "NCCL options differ between ranks: CTA policy %d and %d to %d CTAs on rank 0, but %d and "
                           "%d to %d on rank %d",
                           a->ctas, a->min_ctas, a->max_ctas, b->ctas, b->min_ctas, b->max_ctas, r);
    }
    return ZS_OK;
}

static zs_status check_options(const zs_nccl_options *options)
{
    if (!(options->timeout > 0))
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL: timeout must be positive, got %g s", options->timeout);
    int least = options->min_ctas, most = options->max_ctas;
    if (least < 0 || least > MAX_CTAS || most < 0 || most > MAX_CTAS || (most > 0 && least > most))
        return ZS_FAIL(ZS_ERR_VALUE,
                       "NCCL: min_ctas and max_ctas must be 1 to %d, or 0 for NCCL's default, with min_ctas <= "
                       "max_ctas; got %d and %d",
                       (int)MAX_CTAS, least, most);
    if (options->ctas < ZS_NCCL_CTAS_DEFAULT || options->ctas > ZS_NCCL_CTAS_EFFICIENCY)
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL: unknown CTA policy %d", (int)options->ctas);
    return ZS_OK;
}

/* All that can fail on one rank alone before NCCL creates anything. */
static zs_status prepare(zs_nccl_comm *comm, card *own)
{
    ZS_TRY(check_options(&comm->options));
    ZS_TRY(zs_nccl_load(&comm->nccl));
    own->version = comm->nccl->version;
    char text[16];
    zs_nccl_version_text(own->version, text, sizeof text);
    if (comm->options.ctas == ZS_NCCL_CTAS_EFFICIENCY && own->version < 22700)
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "NCCL %s (%s) does not support CTA policy 'efficiency' (needs 2.27 or newer): upgrade NCCL, or omit ctas",
            text, comm->nccl->where);
    ZS_TRY(zs_nccl_monitor_add(comm));
    if (comm->rank != 0) return ZS_OK;
    pthread_mutex_lock(&comm->lock); /* the monitor already watches it */
    zs_nccl_result result = comm->nccl->GetUniqueId(&own->id);
    zs_status status = zs_nccl_settle(comm, "GetUniqueId", result);
    return zs_nccl_leave(comm, status);
}

static zs_status agree(zs_nccl_comm *comm, zs_comm *control, zs_nccl_id *id)
{
    card *all = NULL, own = {.ctas = (int32_t)comm->options.ctas,
                             .min_ctas = comm->options.min_ctas,
                             .max_ctas = comm->options.max_ctas};
    zs_clear_error();
    zs_status status = prepare(comm, &own);
    if (status != ZS_OK) put_failure(&own, comm, status);
    ZS_TRY(exchange_cards(control, &own, &all));
    status = check_cards(all, control->world);
    *id = all[0].id;
    free(all);
    return status;
}

/* --- making and ending -------------------------------------------------------------------------------------------- */

static zs_nccl_config config_for(const zs_nccl_options *options)
{
    zs_nccl_config config = {.size = sizeof config,
                             .magic = ZS_NCCL_CONFIG_MAGIC,
                             .version = ZS_NCCL_CONFIG_VERSION,
                             .blocking = 0,
                             .cga_cluster_size = ZS_NCCL_CONFIG_UNSET,
                             .min_ctas = ZS_NCCL_CONFIG_UNSET,
                             .max_ctas = ZS_NCCL_CONFIG_UNSET,
                             .split_share = ZS_NCCL_CONFIG_UNSET,
                             .traffic_class = ZS_NCCL_CONFIG_UNSET,
                             .collnet_enable = ZS_NCCL_CONFIG_UNSET,
                             .cta_policy = options->ctas == ZS_NCCL_CTAS_EFFICIENCY ? 1 : ZS_NCCL_CONFIG_UNSET,
                             .shrink_share = ZS_NCCL_CONFIG_UNSET,
                             .nvls_ctas = ZS_NCCL_CONFIG_UNSET};
    if (options->min_ctas > 0) { /* it compares the two even if one is unset, and refuses */
        config.min_ctas = options->min_ctas;
        config.max_ctas = MAX_CTAS;
    }
    if (options->max_ctas > 0) config.max_ctas = options->max_ctas;
    return config;
}

/* With the lock held. The monitor keeps watching: if a peer dies while the ranks connect, it ends the wait. */
static zs_status make(zs_nccl_comm *comm, zs_nccl_id id)
{
    zs_nccl_config config = config_for(&comm->options);
    zs_nccl_result result = comm->nccl->CommInitRankConfig(&comm->handle, comm->world, id, comm->rank, &config);
    double patience = comm->options.timeout / 2; /* a rank that has failed waits to report its reason */
    return zs_nccl_settle_within(comm, "CommInitRankConfig", result, patience);
}

/* Creates the handle, and exchanges the result with all ranks. */
static zs_status make_on_all(zs_nccl_comm *comm, zs_comm *control, zs_nccl_id id)
{
    card own = {0}, *all = NULL;
    ZS_TRY(zs_nccl_enter(comm));
    zs_status status = zs_nccl_leave(comm, make(comm, id));
    if (status == ZS_ERR_TORCH) zs_nccl_comm_abort(comm, "interrupted"); /* the peers see a rank that aborted */
    if (status != ZS_OK) put_failure(&own, comm, status);
    ZS_TRY(exchange_cards(control, &own, &all));
    free(all);
    return ZS_OK;
}

static void destroy(zs_nccl_comm *comm)
{
    pthread_mutex_destroy(&comm->lock);
    free(comm->watched.ring);
    free(comm);
}

zs_status zs_nccl_comm_new(zs_comm *control, const zs_nccl_options *options, zs_nccl_comm **out)
{
    zs_nccl_id id;
    zs_nccl_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an NCCL communicator");
    *comm = (zs_nccl_comm){.rank = control->rank, .world = control->world, .options = *options};
    snprintf(comm->name, sizeof comm->name, "%s", options->name != NULL ? options->name : "unnamed");
    comm->options.name = comm->name;
    comm->lifetime = zs_lifetime();
    pthread_mutex_init(&comm->lock, NULL);
    zs_status status = agree(comm, control, &id);
    ZS_THEN(status, make_on_all(comm, control, id));
    if (status != ZS_OK) {
        zs_nccl_comm_abort(comm, "creation failed on some rank");
        zs_nccl_comm_free(comm);
        return status;
    }
    *out = comm;
    return ZS_OK;
}

/* The normal end. Outstanding work may still need its peers, so the monitor watches until it has ended. */
static void finish(zs_nccl_comm *comm)
{
    comm->ending = true;
    if (zs_nccl_enter(comm) != ZS_OK) return;
    zs_nccl_result result = comm->nccl->CommFinalize(comm->handle);
    double patience = comm->options.timeout < last_patience ? comm->options.timeout : last_patience;
    if (zs_nccl_settle_within(comm, "CommFinalize", result, patience) == ZS_OK) {
        comm->nccl->CommDestroy(comm->handle);
        comm->handle = NULL;
    }
    zs_nccl_poison(comm, ZS_ERR_STATE, "the NCCL communicator is closed");
    comm->reports = false;
    zs_nccl_leave(comm, ZS_OK);
}

void zs_nccl_comm_free(zs_nccl_comm *comm)
{
    if (comm == NULL) return;
    if (comm->lifetime != zs_lifetime()) return; /* a forked child: its copy of the lock may be held forever */
    bool failed = zs_last_status() != ZS_OK;     /* of the caller, which is failing */
    finish(comm);
    if (!failed) zs_clear_error();
    zs_nccl_monitor_remove(comm);
    destroy(comm);
}
