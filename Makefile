# make          builds the installable tree at dist/
# make demo     runs real, unmodified RDMA programs over it
# make test     runs the whole test suite; this is what CI runs
# make install  copies dist/ to PREFIX (default /usr/local)
# make bench    measures, beside raw TCP sockets in the same run
# make programs runs all programs of the table and of the guide, over TCP, over reliable datagrams, and with more rounds
#               where possible over what uwarp chooses, and writes docs/programs.md; each call of the set-up of memory
#               fails with each error
# make siw      runs all tests against the Linux kernel's own iWARP, and prints a table
# make peers    measures beside the kernel's siw and rxe and raw sockets, in one virtual machine, and prints tables; about
#               an hour and a half, less with PEERS="--rounds 1" (conformance/siw/README.md has all options)
# make soak     makes and ends connections for SOAK_SECONDS (default 600) and checks that nothing grows; kills and spoils
#               KILLS (default 1000) processes that share memory with another one, and more until each phase of a stream
#               has had a tenth of them
# make tsan     runs the stress test under the thread sanitizer, UWARP_STRESS_SECONDS for each of its long parts
# make ranks    runs the C programs over a library whose locks check their order (docs/locks.md)
# make aarch64  builds the library's lower half for AArch64 and runs its tests there, emulated; part of make programs
# make fuzz     fuzzes all code that reads network bytes, FUZZ_SECONDS (default 60) for each target, one on each processor
# make fuzz-sockets  compares random sequences of socket calls with the kernel's, SOCK_FUZZ_SECONDS (default 120) for each way
# make clean
#
# Each of them installs what the machine lacks, and says so. CARGO_TARGET_DIR is respected; DIST and PREFIX may be set.

DIST ?= dist
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
KILLS ?= 1000
SOCK_FUZZ_SECONDS ?= 120
# As long as each target runs in make test.
TEST_FUZZ_SECONDS ?= 5
FUZZ ?= $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
PEERS ?= --rounds 5
BENCH ?= latency transactions bandwidth messages rate

export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
export UWARP_DIST := $(abspath $(DIST))
# rustup installs cargo there; a shell that has not read its profile does not have this directory in PATH.
export PATH := $(PATH):$(HOME)/.cargo/bin

CARGO_TEST = cargo test --locked

.PHONY: dist demo test install bench programs siw peers soak tsan ranks aarch64 fuzz fuzz-sockets clean help
.NOTPARALLEL:

dist:
	@scripts/setup build
	cargo build --release --locked -p uwarp -p uwarp-static -p uwarp-fs -p uwarp-sockets -p uwarp-verbs-sockets
	@scripts/make-dist $(CARGO_TARGET_DIR)/release $(UWARP_DIST)
	@echo "Built $(UWARP_DIST). Try: $(DIST)/bin/uwarp doctor"

demo: dist
	@scripts/setup demo
	@scripts/demo $(UWARP_DIST)

# First format and lints, then everything that runs, side by side. The output of each test program is in target/logs;
# what failed in one is printed when it ends, and again at the very end.
test:
	@scripts/setup build demo test siw fuzz
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	@FUZZ="$(FUZZ)" FUZZ_SECONDS=$(TEST_FUZZ_SECONDS) scripts/run-tests unit conformance fuzz

# Builds nothing, so that it can be run as another user than make. Files are replaced, never written over: programs
# that have the old library mapped keep it.
install:
	@[ -e $(UWARP_DIST)/bin/uwarp ] || { echo "There is no $(DIST)/bin/uwarp to install; run make first." >&2; exit 1; }
	mkdir -p $(DESTDIR)$(PREFIX)
	cp -RP --remove-destination $(UWARP_DIST)/. $(DESTDIR)$(PREFIX)

bench: dist
	@for what in $(BENCH); do $(UWARP_DIST)/bin/uwarp bench $$what || exit 1; done

programs: dist aarch64
	@scripts/setup build demo test programs
	PROGRAMS=full $(CARGO_TEST) -p uwarp-conformance --test documents -- the_programs_of_the_guide
	UWARP_LINK=tcp $(CARGO_TEST) -p uwarp-conformance --test programs
	UWARP_LINK=rd $(CARGO_TEST) -p uwarp-conformance --test programs
	PROGRAMS=full $(CARGO_TEST) -p uwarp-conformance --test programs
	PROGRAMS=full $(CARGO_TEST) -p uwarp-conformance --test memory_faults -- a_call_that_fails

siw: dist
	@scripts/setup demo siw
	SIW=full $(CARGO_TEST) -p uwarp-conformance --test siw

# What is measured goes into a file, too; scripts/peers --from reads it again.
peers: dist
	@scripts/setup demo siw peers
	@scripts/peers --json $(CARGO_TARGET_DIR)/peers.json --plot $(CARGO_TARGET_DIR)/peers.svg $(PEERS)

# SOAK_SEED repeats a run as far as threads allow; each prints its own.
soak: dist
	@scripts/setup test
	cc -std=gnu11 -O1 -g -Wall -Wextra -pthread -o $(CARGO_TARGET_DIR)/soak conformance/c/soak.c -lrdmacm -libverbs
	LD_LIBRARY_PATH=$(UWARP_DIST)/lib/uwarp UWARP_LOG=error $(CARGO_TARGET_DIR)/soak 127.0.0.1 $(SOAK_SECONDS) $(SOAK_SEED)
	KILLS=$(KILLS) $(CARGO_TEST) -p uwarp-conformance --test memory_faults -- --nocapture neighbours

# The standard library is the stable toolchain's, which is not instrumented: tsan.supp lists what the sanitizer then
# reports as races. The build has its own directory: otherwise this run and the next one would build everything again.
tsan:
	@scripts/setup build
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
	    TSAN_OPTIONS="suppressions=$(CURDIR)/crates/driver/tests/tsan.supp" \
	    $(CARGO_TEST) -p uwarp-driver --test stress --target-dir $(CARGO_TARGET_DIR)/tsan \
	    --target $$(rustc -vV | sed -n 's/^host: //p')

# The C programs over a library whose locks check their order (docs/locks.md).
ranks:
	@scripts/setup build demo test
	CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true $(MAKE) -s dist CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/ranks \
	    DIST=$(CARGO_TARGET_DIR)/ranks/dist
	UWARP_DIST=$(CARGO_TARGET_DIR)/ranks/dist $(CARGO_TEST) -p uwarp-conformance --test c_programs

# What two processes share in memory is written for processors that order less than x86 does. (The emulator orders as this
# machine's processor does: what may happen in which order is loom's to find. This shows that it is built and works.
# Nor does it pass madvise(2) on, of which the tests that are left out are.)
AARCH64 = aarch64-unknown-linux-gnu
aarch64:
	@scripts/setup build aarch64
	rustup target add $(AARCH64)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	    $(CARGO_TEST) --target $(AARCH64) -p uwarp-wire -p uwarp-mem -p uwarp-proto -p uwarp-rnic -p uwarp-llp --lib \
	    -- --skip populate::tests --skip two_mappings_are_one_memory

fuzz:
	@scripts/setup build fuzz
	@FUZZ="$(FUZZ)" FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/run-tests fuzz

# SOCK_FUZZ_SEED repeats a run.
fuzz-sockets: dist
	@scripts/setup test
	SOCK_FUZZ_SECONDS=$(SOCK_FUZZ_SECONDS) $(CARGO_TEST) -p uwarp-conformance --test socket_fuzz -- --nocapture

clean:
	rm -rf $(UWARP_DIST)
	scripts/old-peer --remove
	cargo clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
