#!/bin/sh
# cell.sh STEP... - steps of one measurement of scripts/peers, in the guest (busybox) or on the host
#
#   serve     starts $SERVER and waits until $READY succeeds, which says that clients can connect
#   connect   runs $CLIENT to its end; beside it $CHECK, which prints what carries the connection until it is ended
#   end       waits for the server, and ends it if it does not end by itself
#
# Each command has $LIMIT seconds. Prints, after lines "@@ NAME PART", what each command printed (out, err), its exit
# status (rc), and by `now` /proc/uptime and the first line of /proc/stat: at the end of serve, before and after the
# client (with /proc/PID/stat of the check), at the begin of end. The files are in $CELL_DIR.
D=${CELL_DIR:-/tmp/cell}

# run NAME COMMAND: its streams and its status in files. A shell of its own, which keeps no other descriptor open.
run() {
  sh -c "timeout $LIMIT $2 >$1.out 2>$1.err & echo \$! >$1.pid; wait \$!; echo \$? >$1.rc" </dev/null >/dev/null 2>&1 &
}
now() { echo "@@ $1 now"; cat /proc/uptime; sed 1q /proc/stat; }
show() {
  for part in out err rc; do
    [ ! -e "$1.$part" ] || { echo "@@ $1 $part"; cat "$1.$part"; echo; }
  done
}

serve() {
  rm -rf "$D"; mkdir -p "$D"; cd "$D" || exit 1
  run server "$SERVER"
  n=0
  until eval "$READY" >/dev/null 2>&1; do
    n=$((n + 1))
    if [ -e server.rc ] || [ $n -ge $((LIMIT * 10)) ]; then
      echo "@@ server mute"
      return 1
    fi
    sleep 0.1
  done
  now listening
}

connect() {
  mkdir -p "$D"; cd "$D" || exit 1
  rm -f client.* link.*
  now before
  run client "$CLIENT"
  waiter=$! check=
  if [ -n "$CHECK" ]; then
    timeout "$LIMIT" sh -c "$CHECK" >link.out 2>link.err </dev/null &
    check=$!
  fi
  wait $waiter
  now after
  if [ -n "$check" ]; then
    cat "/proc/$check/stat" 2>/dev/null
    kill "$check" 2>/dev/null
    wait "$check" 2>/dev/null
  fi
  show client
  show link
}

end() {
  cd "$D" || exit 1
  now ending
  n=0
  while [ ! -e server.rc ] && [ $n -lt 100 ]; do
    # Most end by themselves, at once.
    [ $n -ne 5 ] || kill "$(cat server.pid)" 2>/dev/null
    [ $n -ne 50 ] || kill -9 "$(cat server.pid)" 2>/dev/null
    n=$((n + 1))
    sleep 0.1
  done
  show server
}

for step in "$@"; do
  case $step in
    serve) serve || { end; exit 1; } ;;
    connect) connect ;;
    end) end ;;
    *) echo "cell.sh: no step $step" >&2; exit 2 ;;
  esac
done
