/* peer_table.c - the transport over mappings of the peers' memory. */
#include "comm/peer/peer.h"

ZS_GPU_TABLE(zs_peer_ops, "peer", peer);
