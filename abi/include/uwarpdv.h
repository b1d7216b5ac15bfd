/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * uwarpdv.h: what uwarp's datagram queue pairs can do beyond the verbs. See uwarpdv(3) and uwarpdv_create_qp(3).
 *
 * The functions are in uwarp's libibverbs only. A program that also runs over other devices takes them with dlsym(3), and
 * goes on without them where there are none:
 *
 *	__typeof__(uwarpdv_modify_qp) *modify = dlsym(RTLD_DEFAULT, "uwarpdv_modify_qp");
 */
#ifndef UWARPDV_H
#define UWARPDV_H

#include <stdint.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Payload of the largest message: of every new queue pair, and the most that a program can ask for. */
#define UWARPDV_MESSAGE_DEFAULT 4096
#define UWARPDV_MESSAGE_MOST 65465

/* Members of struct uwarpdv_qp_attr, for comp_mask. */
enum uwarpdv_qp_attr_mask {
	UWARPDV_QP_MAX_MESSAGE = 1 << 0,
	UWARPDV_QP_PEER_ERRORS = 1 << 1,
};

struct uwarpdv_qp_attr {
	uint64_t comp_mask;
	/* Payload of the largest message that may be sent: UWARPDV_MESSAGE_DEFAULT to UWARPDV_MESSAGE_MOST. */
	uint32_t max_message;
	/* Not 0: what peers say of messages that they dropped is kept for uwarpdv_get_peer_error(). */
	uint32_t peer_errors;
};

/* The event_type of ibv_get_async_event(3): a queue pair (element.qp) that had no error of a peer has one. */
#define UWARPDV_EVENT_PEER_ERROR ((enum ibv_event_type)0x80)

/* Why a peer has dropped a message: layer, type and code of RFC 5040 section 4.8 and RFC 5041 section 7.2. */
#define UWARPDV_ERROR_NO_RECEIVE 0x1202
#define UWARPDV_ERROR_TOO_LONG 0x1205

struct uwarpdv_peer_error {
	uint64_t wr_id;			/* of the work request */
	union ibv_gid remote_gid;	/* where it was dropped */
	uint32_t remote_qpn;
	uint32_t msn;			/* number of the message among those that the queue pair has sent, from 1 */
	uint32_t reason;		/* UWARPDV_ERROR_*, or another: layer << 12 | type << 8 | code */
	uint32_t reserved;
};

/* Each returns 0, or an error number: EOPNOTSUPP for a queue pair that is not IBV_QPT_UD, EINVAL.
 *
 * inlen is the size of the structure, sizeof(*attr) or sizeof(*error): a later version of this header has longer ones. */
int uwarpdv_query_qp(struct ibv_qp *qp, struct uwarpdv_qp_attr *attr, uint32_t inlen);
int uwarpdv_modify_qp(struct ibv_qp *qp, const struct uwarpdv_qp_attr *attr, uint32_t inlen);
/* The oldest error that was not taken. EAGAIN: there is none. Never blocks. */
int uwarpdv_get_peer_error(struct ibv_qp *qp, struct uwarpdv_peer_error *error, uint32_t inlen);

/* Reliable datagrams: uwarpdv_create_qp(3). */

/* The type of a queue pair beside those of the verbs, whose own is IBV_QPT_DRIVER. */
enum uwarpdv_qp_type {
	UWARPDV_QPT_RD = 1,
};

enum uwarpdv_qp_create_flags {
	/* Receives begin with 40 bytes for a global routing header, as those of IBV_QPT_UD do. */
	UWARPDV_QP_GRH = 1 << 0,
};

enum uwarpdv_msg_order {
	/* Each message from one queue pair to another is delivered after those that were posted before it. */
	UWARPDV_ORDER_ALL = 1 << 0,
	/* The same of two kinds of operations: R is a read, W a write, S a send; the first behind the second. These are the
	 * words of rdma-core's enum ibv_qp_msg_order (a branch of August 2026). Any of them makes a queue pair ordered. The place
	 * of a Send is that of its completion. */
	UWARPDV_ORDER_ATOMIC_RAR = 1 << 1,
	UWARPDV_ORDER_ATOMIC_RAW = 1 << 2,
	UWARPDV_ORDER_ATOMIC_WAR = 1 << 3,
	UWARPDV_ORDER_ATOMIC_WAW = 1 << 4,
	UWARPDV_ORDER_RDMA_RAR = 1 << 5,
	UWARPDV_ORDER_RDMA_RAW = 1 << 6,
	UWARPDV_ORDER_RDMA_WAR = 1 << 7,
	UWARPDV_ORDER_RDMA_WAW = 1 << 8,
	UWARPDV_ORDER_RAS = 1 << 9,
	UWARPDV_ORDER_SAR = 1 << 10,
	UWARPDV_ORDER_SAS = 1 << 11,
	UWARPDV_ORDER_SAW = 1 << 12,
	UWARPDV_ORDER_WAS = 1 << 13,
	UWARPDV_ORDER_RAR = 1 << 14,
	UWARPDV_ORDER_RAW = 1 << 15,
	UWARPDV_ORDER_WAR = 1 << 16,
	UWARPDV_ORDER_WAW = 1 << 17,
};

struct uwarpdv_qp_init_attr {
	uint64_t comp_mask;		/* 0 */
	uint32_t driver_qp_type;	/* enum uwarpdv_qp_type */
	uint32_t flags;			/* enum uwarpdv_qp_create_flags */
	uint64_t msg_order;		/* enum uwarpdv_msg_order; 0: in any order */
	uint64_t job_key;		/* what peers need to name memory here; 0: none may */
	uint32_t max_records;		/* records of peers that are open or not freed, at most 1024 */
	uint32_t reserved;		/* 0 */
};

/* As ibv_create_qp_ex(3), with attr_ex->qp_type IBV_QPT_DRIVER; or, for records of unreliable datagrams, with IBV_QPT_UD and
 * all members 0 but job_key and max_records. NULL and errno: EINVAL, EOPNOTSUPP, ENOMEM.
 *
 * inlen is sizeof(*attr). What follows known members must be 0, so that a later version can add some. */
struct ibv_qp *uwarpdv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr_ex,
				 struct uwarpdv_qp_init_attr *attr, uint32_t inlen);

/* Members of struct uwarpdv_qp_semantics, for comp_mask. */
enum uwarpdv_qp_semantics_mask {
	UWARPDV_QP_SEMANTICS_MASK_MSG_ORDER = 1 << 0,
	UWARPDV_QP_SEMANTICS_MASK_RAW = 1 << 1,
	UWARPDV_QP_SEMANTICS_MASK_WAR = 1 << 2,
	UWARPDV_QP_SEMANTICS_MASK_WAW = 1 << 3,
	UWARPDV_QP_SEMANTICS_MASK_PDU = 1 << 4,
	UWARPDV_QP_SEMANTICS_MASK_IMM = 1 << 5,
	UWARPDV_QP_SEMANTICS_MASK_USAGE = 1 << 6,
};

enum uwarpdv_qp_use_flags {
	/* A Write with immediate data takes a receive. */
	UWARPDV_QP_USAGE_IMM_DATA_RQ = 1 << 0,
};

/* What queue pairs of a type can guarantee, in the words of rdma-core's struct ibv_qp_semantics. */
struct uwarpdv_qp_semantics {
	uint32_t comp_mask;		/* enum uwarpdv_qp_semantics_mask: the members that were written */
	uint32_t msg_order;		/* enum uwarpdv_msg_order: what uwarpdv_qp_init_attr.msg_order may ask for */
	uint32_t max_rdma_raw_size;	/* bytes of the longest transfer for which UWARPDV_ORDER_RDMA_RAW holds; 0: not at all */
	uint32_t max_rdma_war_size;
	uint32_t max_rdma_waw_size;
	uint32_t max_pdu;		/* 0: a program cannot choose how long packets are */
	uint32_t imm_data_size;		/* bits of immediate data: 32 */
	uint32_t usage_flags;		/* enum uwarpdv_qp_use_flags */
};

/* Returns 0, or EOPNOTSUPP for a type that is not known, EINVAL for NULL or a structure without room for msg_order. Members
 * for which inlen has no room are left out, and those of a later version are 0. */
int uwarpdv_query_qp_semantics(struct ibv_context *context, uint32_t driver_qp_type,
			       struct uwarpdv_qp_semantics *semantics, uint32_t inlen);

/* The job key of the work request that is being built (ibv_wr_post(3)), if not the queue pair's own. */
void uwarpdv_wr_set_job_key(struct ibv_qp_ex *qp, uint64_t job_key);

/* As remote_qpn: any queue pair. */
enum { UWARPDV_ANY_QPN = 0 };

/* Peers that may name memory here: those whose GID begins with prefix_bits bits of prefix. Without any call, all that
 * have the job key may; after one, only those that a call names, at most 64. Returns 0, or EINVAL, EOPNOTSUPP. */
int uwarpdv_allow_source(struct ibv_qp *qp, const union ibv_gid *prefix, uint32_t prefix_bits, uint32_t remote_qpn);

/* RDMA Write-Record: a Write to memory that the sender names, of which the receiver keeps a record. No receive is needed.
 *
 * At the sender it is one work request, built as ibv_wr_post(3) says. imm_data is in network byte order. */
void uwarpdv_wr_rdma_write_record(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, uint32_t imm_data);

/* At the receiver it is a completion with IBV_WC_DRIVER1, on the completion queue of receives: wr_id names the record,
 * byte_len is how many bytes are valid, imm_data the sender's. vendor_err is 1 if some have not come. */
#define UWARPDV_WC_RECORD IBV_WC_DRIVER1

/* The largest message over IBV_QPT_UD, and the most ranges that are valid of one. */
#define UWARPDV_RECORD_MOST (1 << 20)
#define UWARPDV_RANGES_MOST 64

struct uwarpdv_record {
	union ibv_gid remote_gid;	/* of the sender */
	uint64_t addr;			/* where the message begins, as the sender has named it */
	uint32_t length;		/* of the message */
	uint32_t rkey;
	uint32_t remote_qpn;
	uint32_t imm_data;		/* in network byte order */
};

/* Bytes of a message that have come. */
struct uwarpdv_range {
	uint32_t offset;
	uint32_t length;
};

/* Both return 0, or an error number. ENOENT: there is no such record, or it was freed. Neither blocks.
 *
 * *count is the room of ranges before, and how many there are after; ENOSPC: there are more than room. */
int uwarpdv_get_record(struct ibv_qp *qp, uint64_t record, struct uwarpdv_record *out, uint32_t inlen,
		       struct uwarpdv_range *ranges, uint32_t *count);
int uwarpdv_free_record(struct ibv_qp *qp, uint64_t record);

#ifdef __cplusplus
}
#endif

#endif
