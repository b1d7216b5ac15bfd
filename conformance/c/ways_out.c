/* A receiver that leaves right after it has seen the data: whichever way it takes, its sender's work request
 * has succeeded, as over an adapter, which has acknowledged by then.
 *
 *	ways_out [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * Each round has two processes, connected by number. The sender has received answers before, so that the
 * receiver has reason to believe that its program answers the last message, too. */
#define _GNU_SOURCE
#define ROOM 4096
#include <dirent.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "ends.h"

#define ROUNDS 12
/* Messages that the receiver answers first. */
#define ANSWERED 4
/* How long the receiver is stopped, in one of the ways. */
#define STOPPED_US 30000
/* Of the burst, all signalled. */
#define BURST 12

enum way { LEAVES_AT_ONCE, KILLED, EXECUTES, EXITS, TO_ERR, TO_RESET, DESTROYS, CLOSES, COMPUTES, STOPS, TELLS };

/* How the receiver learns of the last message. */
enum sign { POLLED, IN_MEMORY, ARRIVED };

struct story {
	enum way way;
	enum sign sign;
	int last;			/* messages at the end */
	enum ibv_wr_opcode op;
};

/* What the two processes tell each other. */
static struct shared {
	struct card {
		volatile uint32_t qpn, rkey;
		volatile uint64_t addr;
		volatile int step;
	} card[2];
	volatile int posted, good, bad, seen;
	volatile enum ibv_wc_status status;
} *shared;

static void await(volatile int *step, int least)
{
	for (uint64_t end = now_ms() + LIMIT_MS; *step < least; sched_yield())
		if (now_ms() > end)
			die("the other process does not get to step %d", least);
}

/* What is needed to connect to the other process. */
static void get_ready(struct end *end, int me, struct end *peer)
{
	struct card *own = &shared->card[me], *other = &shared->card[!me];
	static struct ibv_qp qp;
	static struct ibv_mr mr;

	open_device();
	end_open(end);
	own->addr = (uintptr_t)end->buffer;
	own->rkey = end->mr->rkey;
	own->qpn = end->qp->qp_num;
	own->step = 1;
	await(&other->step, 1);
	qp.qp_num = other->qpn;
	mr.rkey = other->rkey;
	*peer = (struct end){ .qp = &qp, .mr = &mr, .buffer = (char *)(uintptr_t)other->addr };
}

/* Connects to the other process. */
static void meet(struct end *end, int me, struct end *peer)
{
	struct card *own = &shared->card[me], *other = &shared->card[!me];

	get_ready(end, me, peer);
	end_to_rtr(end, peer);
	own->step = 2;
	await(&other->step, 2);
	end_to_rts(end);
	own->step = 3;
	await(&other->step, 3);
}

/* Whether input of a socket of this process waits to be received. */
static bool input_waits(void)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	bool waits = false;

	MUST(dir);
	while ((entry = readdir(dir))) {
		int n = 0, type, fd = atoi(entry->d_name);
		socklen_t len = sizeof type;

		if (entry->d_name[0] != '.' && getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 &&
		    type == SOCK_STREAM && ioctl(fd, FIONREAD, &n) == 0 && n > 0)
			waits = true;
	}
	closedir(dir);
	return waits;
}

static void receiver(const struct story *story)
{
	struct end end = { 0 }, peer;
	volatile char *memory;
	struct ibv_wc wc;

	meet(&end, 1, &peer);
	memory = end.buffer + ROOM;
	for (int n = 0; n < ANSWERED; n++)
		end_receive(&end, 1, 64);
	for (int n = 0; n < story->last; n++)
		end_receive(&end, 2, 64);
	shared->card[1].step = 4;
	for (int n = 0; n < ANSWERED; n++) {
		MUST(poll_one(end.rcq).status == IBV_WC_SUCCESS);
		end_submit(&end, &peer, IBV_WR_SEND, 3, 8);
		MUST(poll_one(end.scq).status == IBV_WC_SUCCESS);
	}
	switch (story->sign) {
	case POLLED:
		for (int n = 0; n < story->last; n++)
			MUST(poll_one(end.rcq).status == IBV_WC_SUCCESS);
		break;
	case IN_MEMORY:
		while (memory[7] != 'x')
			;
		break;
	case ARRIVED:
		/* It polls in earnest, is told by other means, and polls no more. */
		while (!shared->posted)
			ibv_poll_cq(end.rcq, 1, &wc);
		while (memory[7] != 'x' && !input_waits())
			;
		break;
	}
	shared->seen = 1;
	switch (story->way) {
	case LEAVES_AT_ONCE:
		_exit(0);
	case KILLED:
		kill(getpid(), SIGKILL);
		break;
	case EXECUTES:
		execl("/bin/sleep", "sleep", "60", NULL);
		die("exec");
		break;
	case EXITS:
		exit(0);
	case TO_ERR:
		MUST(to(end.qp, IBV_QPS_ERR) == 0);
		break;
	case TO_RESET:
		MUST(to(end.qp, IBV_QPS_RESET) == 0);
		break;
	case DESTROYS:
		MUST(ibv_destroy_qp(end.qp) == 0);
		break;
	case CLOSES:
		MUST(ibv_close_device(context) == 0);
		break;
	case STOPS:
		kill(getpid(), SIGSTOP);
		break;
	case TELLS:
		/* The sender moves to ERR now. */
		break;
	case COMPUTES:
		for (uint64_t until = now_ms() + LIMIT_MS; !shared->good && !shared->bad && now_ms() < until;)
			;
		break;
	}
	/* Until this process is killed. */
	pause();
	_exit(0);
}

static void count(const struct ibv_wc *wc)
{
	if (wc->status == IBV_WC_SUCCESS) {
		shared->good++;
	} else if (!shared->bad++) {
		shared->status = wc->status;
	}
}

static void sender(const struct story *story)
{
	struct end end = { 0 }, peer;
	struct ibv_wc wc;

	meet(&end, 0, &peer);
	for (int n = 0; n < ANSWERED; n++)
		end_receive(&end, 1, 64);
	await(&shared->card[1].step, 4);
	for (int n = 0; n < ANSWERED; n++) {
		end_submit(&end, &peer, IBV_WR_SEND, 1, 8);
		MUST(poll_one(end.scq).status == IBV_WC_SUCCESS && poll_one(end.rcq).status == IBV_WC_SUCCESS);
	}
	memset(end.buffer, 'x', 8);
	for (int n = 0; n < story->last; n++)
		end_submit(&end, &peer, story->op, 2, 8);
	shared->posted = 1;
	if (story->way == TELLS) {
		/* Told by other means that the data is there, it looks once and ends. */
		await(&shared->seen, 1);
		if (ibv_poll_cq(end.scq, 1, &wc) == 1)
			count(&wc);
		MUST(to(end.qp, IBV_QPS_ERR) == 0);
	}
	while (shared->good + shared->bad < story->last) {
		wc = poll_one(end.scq);
		count(&wc);
	}
	_exit(0);
}

/* The queue pair is in RTR, and its stream is still to come: that is all an adapter needs to receive. */
static void early_receiver(const struct story *story)
{
	struct end end = { 0 }, peer;

	get_ready(&end, 1, &peer);
	end_receive(&end, 2, 64);
	end_to_rtr(&end, &peer);
	shared->card[1].step = 2;
	await(&shared->posted, 1);
	shared->seen = 1;
	if (story->way == DESTROYS)
		MUST(ibv_destroy_qp(end.qp) == 0);
	else
		MUST(to(end.qp, story->way == TO_ERR ? IBV_QPS_ERR : IBV_QPS_RESET) == 0);
	/* Until this process is killed. */
	pause();
	_exit(0);
}

static void early_sender(const struct story *story)
{
	struct end end = { 0 }, peer;
	struct ibv_wc wc;

	get_ready(&end, 0, &peer);
	await(&shared->card[1].step, 2);
	end_to_rtr(&end, &peer);
	end_to_rts(&end);
	end_submit(&end, &peer, story->op, 2, 8);
	shared->posted = 1;
	wc = poll_one(end.scq);
	count(&wc);
	_exit(0);
}

static pid_t start(void (*run)(const struct story *), const struct story *story)
{
	pid_t pid = fork();

	MUST(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		run(story);
	}
	return pid;
}

static void tell_of(void (*receiver)(const struct story *), void (*sender)(const struct story *),
		    struct story story, const char *name)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	int good = 0, rounds = 0, of = 0;

	/* (A work request without a peer takes half a minute to fail.) */
	for (; rounds < ROUNDS && good == of; rounds++) {
		pid_t r, s;
		int result;

		memset(shared, 0, sizeof *shared);
		r = start(receiver, &story);
		s = start(sender, &story);
		if (story.way == STOPS) {
			MUST(waitpid(r, &result, WUNTRACED) == r && WIFSTOPPED(result));
			usleep(STOPPED_US);
			MUST(kill(r, SIGCONT) == 0);
		}
		MUST(waitpid(s, &result, 0) == s);
		MUST(WIFEXITED(result) && WEXITSTATUS(result) == 0);
		await(&shared->seen, 1);
		kill(r, SIGKILL);
		MUST(waitpid(r, &result, 0) == r);
		good += shared->good;
		of += story.last;
		if (shared->bad)
			status = shared->status;
	}
	check(good == of, name, "%d of %d succeed, others %s", good, of, ibv_wc_status_str(status));
}

static void tell(struct story story, const char *name)
{
	tell_of(receiver, sender, story, name);
}

static void map(void)
{
	if (!shared)
		shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(shared != MAP_FAILED);
}

#define SEND IBV_WR_SEND
#define WRITE IBV_WR_RDMA_WRITE

/* Whether it can be read from memory how many messages a process that is gone had placed. TCP shows only how its stream
 * ended: a request for an acknowledgement that the last of several messages did not carry, and that nobody has read, makes
 * its end a reset (docs/adr/009; 1 of 12 rounds or more). */
static bool counts(void)
{
	const char *link = getenv("LINK");

	return !link || strcmp(link, "tcp");
}

static void leaving(void)
{
	map();
	tell((struct story){ LEAVES_AT_ONCE, POLLED, 1, SEND }, "a Send, then _exit");
	if (counts())
		tell((struct story){ LEAVES_AT_ONCE, POLLED, BURST, SEND }, "twelve Sends, then _exit");
	tell((struct story){ LEAVES_AT_ONCE, IN_MEMORY, 1, WRITE }, "a Write seen in memory, then _exit");
}

static void killed(void)
{
	map();
	tell((struct story){ KILLED, POLLED, 1, SEND }, "a Send, then SIGKILL");
	if (counts())
		tell((struct story){ KILLED, POLLED, BURST, SEND }, "twelve Sends, then SIGKILL");
	tell((struct story){ KILLED, IN_MEMORY, 1, WRITE }, "a Write seen in memory, then SIGKILL");
}

/* Its program does nothing more of its own: the library's thread acknowledges when it goes on. */
static void stopping(void)
{
	map();
	tell((struct story){ STOPS, POLLED, 1, SEND }, "a Send, then SIGSTOP and SIGCONT");
	tell((struct story){ STOPS, POLLED, BURST, SEND }, "a burst of Sends, then SIGSTOP and SIGCONT");
	tell((struct story){ STOPS, IN_MEMORY, 1, WRITE }, "a Write seen in memory, then SIGSTOP and SIGCONT");
}

static void executing(void)
{
	map();
	tell((struct story){ EXECUTES, POLLED, 1, SEND }, "a Send, then another program");
	if (counts())
		tell((struct story){ EXECUTES, POLLED, BURST, SEND }, "twelve Sends, then another program");
	tell((struct story){ EXECUTES, IN_MEMORY, 1, WRITE }, "a Write seen in memory, then another program");
}

static void exiting(void)
{
	map();
	tell((struct story){ EXITS, POLLED, 1, SEND }, "a Send, then exit");
	tell((struct story){ EXITS, ARRIVED, 1, SEND }, "a Send has arrived, then exit");
}

static void erring(void)
{
	map();
	tell((struct story){ TO_ERR, POLLED, 1, SEND }, "a Send, then ERR");
	tell((struct story){ TO_ERR, POLLED, BURST, SEND }, "twelve Sends, then ERR");
	tell((struct story){ TO_ERR, ARRIVED, 1, SEND }, "a Send has arrived, then ERR");
}

static void telling(void)
{
	map();
	tell((struct story){ TELLS, POLLED, 1, SEND }, "a Send, of which the sender is told before it moves to ERR");
	tell((struct story){ TELLS, POLLED, BURST, SEND }, "twelve Sends, of which the sender is told before ERR");
}

static void resetting(void)
{
	map();
	tell((struct story){ TO_RESET, POLLED, 1, SEND }, "a Send, then RESET");
	tell((struct story){ TO_RESET, ARRIVED, 1, SEND }, "a Send has arrived, then RESET");
}

static void destroying(void)
{
	map();
	tell((struct story){ DESTROYS, POLLED, 1, SEND }, "a Send, then the queue pair is destroyed");
	tell((struct story){ DESTROYS, ARRIVED, 1, SEND }, "a Send has arrived, then the queue pair is destroyed");
	tell((struct story){ CLOSES, ARRIVED, 1, SEND }, "a Send has arrived, then the device is closed");
}

static void computing(void)
{
	map();
	tell((struct story){ COMPUTES, POLLED, 1, SEND }, "a Send, then the receiver computes");
	tell((struct story){ COMPUTES, IN_MEMORY, 1, WRITE }, "a Write seen in memory, then the receiver computes");
}

static void setting_up(void)
{
	map();
	tell_of(early_receiver, early_sender, (struct story){ TO_ERR, POLLED, 1, SEND }, "a Send to RTR, then ERR");
	tell_of(early_receiver, early_sender, (struct story){ TO_RESET, POLLED, 1, SEND }, "a Send to RTR, then RESET");
	tell_of(early_receiver, early_sender, (struct story){ DESTROYS, POLLED, 1, SEND },
		"a Send to RTR, then the queue pair is destroyed");
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "leaving", leaving }, { "killed", killed }, { "stopping", stopping },
		{ "executing", executing }, { "exiting", exiting },
		{ "erring", erring }, { "resetting", resetting }, { "destroying", destroying },
		{ "telling", telling }, { "computing", computing }, { "setting_up", setting_up },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
