/* buffers.c - the model's buffers, which all ranks get from rank 0, as in DDP: see zs_engine_sync_buffers. */

#include "engine/engine_inside.h"

#include <stdlib.h>

void zs_buffers_free(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n_buffers; i++)
        zs_tensor_free(engine->buffers[i]);
    free(engine->buffers);
    engine->buffers = NULL;
    engine->n_buffers = 0;
}

void zs_engine_sync_buffers(zs_engine *engine, zs_tensor **tensors, size_t n, bool in_training)
{
    zs_buffers_free(engine);
    engine->buffers = tensors;
    engine->n_buffers = n;
    engine->buffers_in_training = in_training;
}

static zs_status copy_all(const zs_engine *engine)
{
    for (size_t i = 0; i < engine->n_buffers; i++) {
        if (!zs_tensor_alive(engine->buffers[i])) continue;
        zs_tensor_info info;
        void *data = NULL;
        ZS_TRY(zs_tensor_describe(engine->buffers[i], &info));
        if (info.numel == 0) continue;
        if (!info.contiguous)
            return ZS_FAIL(ZS_ERR_UNSUPPORTED, "forward_sync_buffers requires contiguous buffers: make them "
                                               "contiguous, or pass forward_sync_buffers=False");
        ZS_TRY(zs_tensor_data(engine->buffers[i], &data));
        size_t bytes = (size_t)info.numel * info.itemsize;
        ZS_TRY(zs_comm_broadcast_at(engine->context.ranks.all, info.where, data, bytes, 0));
    }
    return ZS_OK;
}

static zs_status copy_buffers(const zs_engine *engine)
{
    bool named = zs_call_begin("forward()");
    zs_status status = copy_all(engine);
    if (named) zs_call_end();
    return status;
}

zs_status zs_engine_broadcast_buffers(zs_engine *engine)
{
    if (engine->buffers_kept) return ZS_OK;
    ZS_TRY(copy_buffers(engine));
    engine->buffers_kept = true;
    return ZS_OK;
}

/* Do the next backwards reduce gradients? */
static bool reduces(const zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        const zs_record *record = engine->context.schedule.records[i];
        if (record->is.reduces && record->sync) return true;
    }
    return false;
}

/* See zs_engine_sync_buffers. */
zs_status zs_buffers_sync(zs_engine *engine, const zs_entry *entry)
{
    if (entry->by_hand || engine->n_buffers == 0) return ZS_OK;
    if (engine->buffers_in_training && !entry->recording) return ZS_OK;
    if (!engine->buffers_in_training || !engine->buffers_kept) ZS_TRY(copy_buffers(engine));
    engine->buffers_kept = !reduces(engine);
    return ZS_OK;
}
