/* A library with one device, compiled against the header that programs use: what `uwarp devices` makes of it shows
 * whether the command and the header mean the same structures. VIEW_ROCE gives it another face, CRASH a bad day. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>

#undef ibv_query_port

static struct ibv_device device = {
#ifdef VIEW_ROCE
	.node_type = IBV_NODE_CA,
	.transport_type = IBV_TRANSPORT_IB,
#else
	.node_type = IBV_NODE_RNIC,
	.transport_type = IBV_TRANSPORT_IWARP,
#endif
	.name = "stand_in0",
};
static struct ibv_context context = { .device = &device };
static int open_contexts;

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

#ifdef CRASH
	abort();
#endif
	*count = 1;
	list[0] = &device;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	/* Every context is to be closed by then. */
	if (open_contexts)
		abort();
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *d)
{
	return d->name;
}

__be64 ibv_get_device_guid(struct ibv_device *d)
{
	unsigned char bytes[8] = { 0x02, 0, 0, 0xff, 0xfe, 0, 0x12, 0x34 };
	__be64 guid;

	memcpy(&guid, bytes, sizeof(guid));
	return guid;
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	open_contexts++;
	return &context;
}

int ibv_close_device(struct ibv_context *c)
{
	open_contexts--;
	return 0;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	strcpy(attr->fw_ver, "1.2.3");
	attr->phys_port_cnt = 1;
	return 0;
}

int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;

	if (port != 1)
		return EINVAL;
	attr->state = IBV_PORT_ACTIVE;
	attr->active_mtu = IBV_MTU_1024;
	attr->gid_tbl_len = 3;
	attr->max_msg_sz = 1U << 30;
	attr->lid = 7;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, uint16_t *pkey)
{
	*pkey = 0xffff;
	return c && port == 1 && index == 0 ? 0 : -1;
}

int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
		      uint32_t flags, size_t size)
{
	static const unsigned char v4[16] = { [10] = 0xff, 0xff, 127, 0, 0, 1 };
	static const unsigned char v6[16] = { 0xfd, [15] = 2 };

	if (size != sizeof(*entry) || port != 1)
		return EINVAL;
	/* A hole in the table. */
	if (index == 1)
		return ENODATA;
	memcpy(entry->gid.raw, index ? v6 : v4, 16);
	entry->gid_index = index;
	entry->port_num = port;
	entry->gid_type = index ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_IB;
	return 0;
}

const char *ibv_port_state_str(enum ibv_port_state state)
{
	return state == IBV_PORT_ACTIVE ? "PORT_ACTIVE" : "another";
}
