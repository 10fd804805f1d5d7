/* shm_reader.h - readers' part of the transport's table, see comm_ops.h. */
#ifndef ZS_SHM_READER_H
#define ZS_SHM_READER_H

#include "comm/shm/shm.h"

/* reader_new. */
zs_status zs_shm_reader_new(zs_comm *comm, const char *name, zs_reader **out);

/* reader_free; NULL allowed. */
void zs_shm_reader_free(zs_comm *comm, zs_reader *reader);

/* read_begin. A forward that begins inside another pass ends that pass, which must have failed. */
zs_status zs_shm_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading);

/* read_end; ZS_ERR_STATE if no such pass has begun. */
zs_status zs_shm_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase);

/* write_begin. */
zs_status zs_shm_write_begin(zs_comm *comm, zs_reader *reader);

/* write_end. */
void zs_shm_write_end(zs_comm *comm, zs_reader *reader, bool known);

/* write_complete; ends a write that has begun. */
void zs_shm_write_complete(zs_comm *comm, zs_reader *reader, bool changed);

/* meet. */
void zs_shm_readers_barrier(zs_comm *comm, zs_reader *reader);

/* publish_fingerprint. */
void zs_shm_publish_fingerprint(zs_comm *comm, zs_reader *reader, const zs_fingerprint *now);

#endif
