/* What socket_fuzz.c knows of the sockets of a sequence, and how it compares what is seen with what was recorded. */
#ifndef UWARP_CONFORMANCE_SOCKET_FUZZ_H
#define UWARP_CONFORMANCE_SOCKET_FUZZ_H

#include <rdma/rsocket.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/time.h>

#include "iwarp_mode.h"

#define SLOTS 8
#define CONNS 200
#define LINES 512
#define LINE 512
/* Bytes of one direction that may be on their way: less than the smallest buffer. */
#define ROOM 6000
#define ALL (POLLIN | POLLOUT | POLLRDHUP)

/* ---------------------------------------------------------------- the ways */

/* How long a state may take to become the recorded one: SETTLE_MS. A sequence that is known to differ is shortened with less. */
static unsigned settle_ms = 15000;

static enum way { KERNEL, MODE, RSOCKETS } way;
static bool simple;

/* A call of the way. Those of the kernel include what a preloaded library makes of them. */
#define ON(name, ...) (way == KERNEL ? name(__VA_ARGS__) : way == MODE ? CALL(name, __VA_ARGS__) : r##name(__VA_ARGS__))
/* A call that IWARP_MODE leaves to the kernel. */
#define OF(name, ...) (way == RSOCKETS ? r##name(__VA_ARGS__) : name(__VA_ARGS__))

/* ---------------------------------------------------------------- the world */

struct slot {
	int fd;				/* -1: none */
	enum { FRESH, LISTENING, CONNECTED, FAILED } is;
	int conn, end;			/* of a connected one */
	bool nonblocking, in_set, stirred;	/* stirred: shut down since it was entered in the set */
	int waiting[4], count;		/* of a listener: connections that nobody has taken */
	struct sockaddr_in at;
};

struct conn {
	unsigned sent[2], got[2];	/* bytes, by the end that sends them */
	int refs[2];
	/* Of an end: no more sends; no more reads; ends with a reset; O_NONBLOCK; SO_RCVTIMEO. */
	bool shut_write[2], shut_read[2], abrupt[2], nonblocking[2], timed[2];
	/* The other end has ended otherwise than by a farewell. TCP resets, others say that the stream is at its end. So the end is only
	 * closed from then on. */
	bool hard[2];
	bool taken;
};

static struct slot slots[SLOTS];
static struct conn conns[CONNS];
static int conn_count, set = -1;
static volatile sig_atomic_t broken_pipes;
static uint64_t random_state;

static unsigned draw(unsigned below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return below ? (unsigned)((random_state >> 11) % below) : 0;
}

static void seed_step(uint64_t seed, unsigned step)
{
	random_state = (seed + 1) * 0x9E3779B97F4A7C15ull ^ (step + 1) * 0xD1B54A32D192ED03ull;
	if (random_state == 0)
		random_state = 1;
	for (int i = 0; i < 8; i++)
		draw(0);
}

static unsigned char pattern(int conn, int end, unsigned at)
{
	return (unsigned char)(at * 7 + at / 251 + (unsigned)conn * 13 + (unsigned)end * 101);
}

static bool is_connected(const struct slot *s)
{
	return s->fd >= 0 && s->is == CONNECTED;
}

/* Nor is what a refused socket shows: the kernel's is like a new one when the refusal was reported. */
static bool is_hard(const struct slot *s)
{
	return s->fd >= 0 && (s->is == FAILED || (s->is == CONNECTED && conns[s->conn].hard[s->end]));
}

/* The peer has closed, after a farewell. */
static bool peer_is_gone(const struct slot *s)
{
	return is_connected(s) && conns[s->conn].refs[!s->end] == 0;
}

/* Bytes that this end has not read. */
static unsigned unread(const struct slot *s)
{
	const struct conn *c = &conns[s->conn];

	return c->sent[!s->end] - c->got[!s->end];
}

static bool *nonblocking(struct slot *s)
{
	return s->is == CONNECTED ? &conns[s->conn].nonblocking[s->end] : &s->nonblocking;
}

/* ---------------------------------------------------------------- what is compared */

static char lines[LINES][LINE];
static int line_count, line_at;
static bool checking, different;
static char said[LINE];

static void say(const char *format, ...)
{
	size_t at = strlen(said);
	va_list ap;

	va_start(ap, format);
	vsnprintf(said + at, sizeof said - at, format, ap);
	va_end(ap);
}

static void say_result(long n)
{
	if (n < 0)
		say(" = %s", strerrorname_np(errno) ? strerrorname_np(errno) : "?");
	else
		say(" = %ld", n);
}

/* What is recorded of this step, behind the text so far. */
static const char *recorded(void)
{
	const char *line = line_at < line_count ? lines[line_at] : "";

	return strncmp(line, said, strlen(said)) == 0 ? line + strlen(said) : "";
}

/* Says what `look` sees. If that is not what was recorded, it may come yet. */
static void say_seen(void (*look)(char *to, size_t size))
{
	const char *want = recorded();
	uint64_t end = now_ms() + settle_ms;
	char seen[LINE];

	for (;;) {
		memset(seen, 0, sizeof seen);
		look(seen, sizeof seen - 1);
		if (!checking || now_ms() > end || (strncmp(want, seen, strlen(seen)) == 0 && strchr(" ", want[strlen(seen)])))
			break;
		usleep(200);
	}
	say("%s", seen);
}

static short now_of(int fd)
{
	struct pollfd p = { .fd = fd, .events = ALL };

	MUST(ON(poll, &p, 1, 0) >= 0);
	return p.revents;
}

static bool other_than_kernels;

static bool same_events(int i, unsigned want, unsigned got)
{
	if (want == got || !other_than_kernels || (want ^ got) != POLLHUP)
		return want == got;
	/* A peer that has closed. TCP learns that it does not receive any more only when it sends. And what is unread comes before a
	 * hang-up: programs give up on that. */
	return got & POLLHUP ? peer_is_gone(&slots[i]) : is_connected(&slots[i]) && unread(&slots[i]) > 0;
}

static void states(short *to)
{
	for (int i = 0; i < SLOTS; i++)
		to[i] = slots[i].fd < 0 || is_hard(&slots[i]) ? -1 : now_of(slots[i].fd);
}

/* What must come is there. A busy machine may be slow to deliver it. */
static bool has_come(const struct slot *s, short got)
{
	if (s->fd < 0 || is_hard(s))
		return true;
	if (s->is == LISTENING)
		return s->count == 0 || got & POLLIN;
	if (s->is != CONNECTED)
		return true;
	if ((unread(s) > 0 || conns[s->conn].shut_write[!s->end]) && !(got & POLLIN))
		return false;
	return !conns[s->conn].shut_write[!s->end] || got & POLLRDHUP;
}

/* Says the states when they are as recorded, or when they have stayed the same for a moment. */
static void say_states(void)
{
	short want[SLOTS], got[SLOTS], before[SLOTS];
	const char *text = strstr(recorded(), " | ");
	uint64_t end = now_ms() + settle_ms;
	bool same = false;

	for (int i = 0; i < SLOTS; i++) {
		char name[8];
		const char *at;
		unsigned value;

		snprintf(name, sizeof name, " %d:", i);
		at = text ? strstr(text, name) : NULL;
		want[i] = at && sscanf(at + strlen(name), "%x", &value) == 1 ? (short)value : -1;
	}
	states(got);
	for (int quiet = 0; !same && now_ms() < end; ) {
		memcpy(before, got, sizeof got);
		if (!checking) {
			usleep(300);
			states(got);
			quiet = memcmp(before, got, sizeof got) ? 0 : quiet + 1;
			same = quiet >= 3;
			for (int i = 0; i < SLOTS; i++)
				same = same && has_come(&slots[i], got[i]);
			continue;
		}
		same = true;
		for (int i = 0; i < SLOTS; i++)
			same = same && (want[i] == got[i] || same_events(i, (unsigned short)want[i], (unsigned short)got[i]));
		if (!same) {
			usleep(200);
			states(got);
		}
	}
	say(" |");
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].fd >= 0 && got[i] != -1)
			say(" %d:%x", i, (unsigned short)(checking && same ? want[i] : got[i]));
}

/* The step is done. */
static void done(void)
{
	if (broken_pipes && !simple)
		say(" SIGPIPE %d", (int)broken_pipes);
	broken_pipes = 0;
	say_states();
	if (checking) {
		const char *want = line_at < line_count ? lines[line_at] : "nothing";

		if (strcmp(want, said) != 0) {
			printf("want %s\ngot  %s\n", want, said);
			different = true;
		}
	} else {
		puts(said);
	}
	line_at++;
}

/* ---------------------------------------------------------------- choosing */

/* A slot with a socket that is this, mostly; else any. */
static int pick(bool (*is)(const struct slot *))
{
	int found[SLOTS], count = 0;
	unsigned which = draw(1000);

	for (int i = 0; i < SLOTS; i++)
		if (is(&slots[i]))
			found[count++] = i;
	return count && which % 8 ? found[which / 8 % (unsigned)count] : (int)(which / 8 % SLOTS);
}

static bool is_none(const struct slot *s)
{
	return s->fd < 0;
}

static bool is_fresh(const struct slot *s)
{
	return s->fd >= 0 && s->is == FRESH;
}

static bool is_listening(const struct slot *s)
{
	return s->fd >= 0 && s->is == LISTENING;
}

static bool has_waiting(const struct slot *s)
{
	return is_listening(s) && s->count > 0;
}

static bool is_usable(const struct slot *s)
{
	return is_connected(s) && !is_hard(s) && !peer_is_gone(s);
}

static bool has_unread(const struct slot *s)
{
	return is_connected(s) && !is_hard(s) && unread(s) > 0;
}

/* To be closed sooner than others: nothing more can be done with it. */
static bool is_done(const struct slot *s)
{
	return s->fd >= 0 && (s->is == FAILED || is_hard(s) || peer_is_gone(s));
}

#endif
