-- Wireshark reads datagram-iWARP (docs/datagram-iwarp.md), iWARP over UDP, and its reliable service
-- (docs/rd.md).
--
--   tshark -X lua_script:datagram-iwarp.lua -r FILE
--   wireshark -X lua_script:datagram-iwarp.lua FILE
--
-- Or copy this file into the folder that Help > About Wireshark > Folders calls "Personal Lua Plugins".
-- Filters: diwarp, diwarp.msn == 7, diwarp.crc.status == "Bad", diwarp.qkey == 0x11111111 …

local diwarp = Proto("diwarp", "Datagram-iWARP")

local VERSION = 1
local HEADER, DDP, CRC = 20, 18, 4
local GROUP = 0xffffff

local KINDS = {
    [0] = "Message", [1] = "Lookup Request", [2] = "Lookup Reply", [3] = "Proof Request", [4] = "Proof Reply",
    [5] = "Memory Request", [6] = "Memory Reply", [7] = "Memory Begins", [8] = "Record",
    [9] = "Part", [10] = "Parts Request", [11] = "Parts Reply",
}
local PROOF_REQUEST, PROOF_REPLY = 3, 4
local MEMORY_REQUEST, MEMORY_BEGINS = 5, 7
local RECORD, RECORD_HEADER = 8, 20
local PART, PARTS_REQUEST, PARTS_REPLY = 9, 10, 11
local OPCODES = {
    [0] = "RDMA Write", [1] = "Read Request", [2] = "Read Response", [3] = "Send",
    [4] = "Send with Invalidate", [5] = "Send with SE", [6] = "Send with SE and Invalidate",
    [7] = "Error Message", [8] = "Immediate Data", [9] = "Immediate Data with SE",
    [10] = "Atomic Request", [11] = "Atomic Response", [12] = "RDMA Write-Record",
}
local SEND, SEND_SE, ERROR = 3, 5, 7
local QUEUES = { [0] = "Send", [1] = "RDMA Read", [2] = "Error" }
local LAYERS = { [0] = "RDMAP", [1] = "DDP", [2] = "LLP" }
local ERRORS = {
    [0x0205] = "RDMAP: another RDMAP version", [0x0206] = "RDMAP: unexpected opcode",
    [0x02ff] = "RDMAP: unspecified error", [0x1201] = "DDP: invalid queue",
    [0x1202] = "DDP: no receive buffer", [0x1204] = "DDP: invalid message offset",
    [0x1205] = "DDP: message longer than the receive buffer", [0x1206] = "DDP: another DDP version",
}
local SPACES = { [0x0111] = "RDMA_PS_UDP", [0x0002] = "RDMA_PS_IPOIB" }
local STATUSES = {
    [0] = "Success", [1] = "Unsupported", [2] = "Rejected", [3] = "No queue pair",
    [0x8000] = "Cookie required",
}

local RD_KINDS = {
    [0] = "Packet", [1] = "Hello", [2] = "Challenge", [3] = "Open", [4] = "Unknown", [5] = "Cross",
}
local RD_VERSION, RD_OPEN = 1, 24
local CHUNKS = {
    [0] = "PAD", [1] = "ACK", [2] = "SEGMENT", [3] = "STREAM", [4] = "VERDICT", [5] = "READY", [6] = "CLAIM",
    [7] = "PING", [8] = "CLOSE", [9] = "STREAM-CREDIT", [10] = "STREAM-RESET", [11] = "ABANDON",
}
-- Bytes of each chunk at least, its header included.
local SHORTEST = {
    [0] = 4, [1] = 20, [2] = 30, [3] = 12, [4] = 12, [5] = 8, [6] = 24, [7] = 4, [8] = 12, [9] = 12,
    [10] = 12, [11] = 4,
}
local REASONS = {
    [1] = "receiver not ready", [2] = "invalid request", [3] = "access", [4] = "invalid destination",
    [5] = "aborted", [6] = "operation",
}

local f = {
    version = ProtoField.uint8("diwarp.version", "Version"),
    source = ProtoField.uint24("diwarp.srcqp", "Source QPN", base.HEX),
    flags = ProtoField.uint8("diwarp.flags", "Flags", base.HEX),
    immediate_flag = ProtoField.bool("diwarp.flags.immediate", "I: immediate data", 8, nil, 0x80),
    reliable_flag = ProtoField.bool("diwarp.flags.reliable", "R: reliable service", 8, nil, 0x40),
    reserved_flags = ProtoField.uint8("diwarp.flags.reserved", "Reserved", base.HEX, nil, 0x30),
    kind = ProtoField.uint8("diwarp.kind", "Kind", base.DEC, KINDS, 0x0f),
    destination = ProtoField.uint24("diwarp.dstqp", "Destination QPN", base.HEX),
    qkey = ProtoField.uint32("diwarp.qkey", "Q_Key", base.HEX),
    immediate = ProtoField.uint32("diwarp.immediate", "Immediate", base.HEX),
    incarnation = ProtoField.uint32("diwarp.incarnation", "Incarnation", base.HEX),
    part_number = ProtoField.uint32("diwarp.part.number", "Number"),
    part_length = ProtoField.uint16("diwarp.part.length", "Length of the datagram"),
    part_offset = ProtoField.uint16("diwarp.part.offset", "Offset"),
    part_bytes = ProtoField.bytes("diwarp.part.bytes", "Bytes of the datagram"),
    part_padding = ProtoField.bytes("diwarp.part.padding", "Padding"),
    parts_token = ProtoField.bytes("diwarp.parts.token", "Token"),
    transaction = ProtoField.uint32("diwarp.lookup.transaction", "Transaction", base.HEX),
    ddp = ProtoField.none("diwarp.ddp", "DDP header"),
    tagged = ProtoField.bool("diwarp.ddp.tagged", "T: tagged", 8, nil, 0x80),
    last = ProtoField.bool("diwarp.ddp.last", "L: last segment", 8, nil, 0x40),
    ddp_reserved = ProtoField.uint8("diwarp.ddp.reserved", "Reserved", base.HEX, nil, 0x3c),
    dv = ProtoField.uint8("diwarp.ddp.version", "DDP version", base.DEC, nil, 0x03),
    rv = ProtoField.uint8("diwarp.rdmap.version", "RDMAP version", base.DEC, nil, 0xc0),
    rdmap_reserved = ProtoField.uint8("diwarp.rdmap.reserved", "Reserved", base.HEX, nil, 0x30),
    opcode = ProtoField.uint8("diwarp.rdmap.opcode", "Opcode", base.DEC, OPCODES, 0x0f),
    invalidate = ProtoField.uint32("diwarp.rdmap.invalidate", "Invalidate STag (not used)", base.HEX),
    qn = ProtoField.uint32("diwarp.qn", "Queue", base.DEC, QUEUES),
    msn = ProtoField.uint32("diwarp.msn", "MSN"),
    mo = ProtoField.uint32("diwarp.mo", "Message offset"),
    payload = ProtoField.bytes("diwarp.payload", "Payload"),
    layer = ProtoField.uint8("diwarp.error.layer", "Layer", base.DEC, LAYERS, 0xf0),
    etype = ProtoField.uint8("diwarp.error.type", "Error type", base.DEC, nil, 0x0f),
    code = ProtoField.uint8("diwarp.error.code", "Error code", base.HEX),
    error_zero = ProtoField.uint16("diwarp.error.zero", "Zero", base.HEX),
    space = ProtoField.uint16("diwarp.lookup.space", "Port space", base.HEX, SPACES),
    status = ProtoField.uint16("diwarp.lookup.status", "Status", base.DEC, STATUSES),
    service = ProtoField.uint16("diwarp.lookup.service", "Service port"),
    lookup_reserved = ProtoField.bytes("diwarp.lookup.reserved", "Reserved"),
    data_len = ProtoField.uint8("diwarp.lookup.datalen", "Data length"),
    cookie = ProtoField.uint64("diwarp.lookup.cookie", "Cookie", base.HEX),
    private_data = ProtoField.bytes("diwarp.lookup.data", "Private data"),
    padding = ProtoField.bytes("diwarp.lookup.padding", "Padding"),
    token = ProtoField.uint64("diwarp.proof.token", "Token", base.HEX),
    proof_made = ProtoField.uint64("diwarp.proof.made", "Cookie: made at (clock of its maker)"),
    proof_hash = ProtoField.uint64("diwarp.proof.hash", "Cookie: hash", base.HEX),
    memory_token = ProtoField.bytes("diwarp.memory.token", "Token"),
    memory_name = ProtoField.bytes("diwarp.memory.name", "Process"),
    memory_word = ProtoField.bytes("diwarp.memory.word", "Word"),
    rd_version = ProtoField.uint8("diwarp.rd.version", "RD version"),
    rd_kind = ProtoField.uint8("diwarp.rd.kind", "Kind", base.DEC, RD_KINDS, 0x0f),
    rd_source = ProtoField.uint16("diwarp.rd.srcport", "Source home port"),
    rd_destination = ProtoField.uint16("diwarp.rd.dstport", "Destination port"),
    rd_key = ProtoField.uint64("diwarp.rd.key", "Key", base.HEX),
    rd_number = ProtoField.uint32("diwarp.rd.pn", "Packet number (low 32 bits)"),
    rd_highest = ProtoField.uint8("diwarp.rd.highest", "Highest version"),
    rd_features = ProtoField.uint32("diwarp.rd.features", "Features", base.HEX),
    rd_home = ProtoField.uint16("diwarp.rd.home", "Home port"),
    rd_asked = ProtoField.uint16("diwarp.rd.asked", "Asked port"),
    rd_cookie_key = ProtoField.uint64("diwarp.rd.cookie.key", "Cookie: key of the responder", base.HEX),
    rd_cookie_made = ProtoField.uint64("diwarp.rd.cookie.made", "Cookie: made at (clock of its maker)"),
    rd_credit = ProtoField.uint16("diwarp.rd.credit", "Credit (units of 4 KiB)"),
    rd_largest = ProtoField.uint16("diwarp.rd.largest", "Largest packet"),
    rd_token = ProtoField.uint64("diwarp.rd.token", "Token", base.HEX),
    rd_chunk = ProtoField.none("diwarp.rd.chunk", "Chunk"),
    rd_type = ProtoField.uint8("diwarp.rd.chunk.type", "Type", base.DEC, CHUNKS),
    rd_flags = ProtoField.uint8("diwarp.rd.chunk.flags", "Flags", base.HEX),
    rd_len = ProtoField.uint16("diwarp.rd.chunk.len", "Length"),
    rd_acked = ProtoField.uint32("diwarp.rd.ack.largest", "Largest packet number"),
    rd_delay = ProtoField.uint16("diwarp.rd.ack.delay", "Delay (units of 4 us)"),
    rd_blind = ProtoField.uint16("diwarp.rd.ack.blind", "Blind (units of 4 us)"),
    rd_floor = ProtoField.uint32("diwarp.rd.floor", "Done floor"),
    rd_ce = ProtoField.uint32("diwarp.rd.ack.ce", "CE marks"),
    rd_gap = ProtoField.uint16("diwarp.rd.ack.gap", "Gap"),
    rd_length = ProtoField.uint16("diwarp.rd.ack.length", "Length"),
    rd_behind = ProtoField.uint16("diwarp.rd.behind", "Behind"),
    rd_message = ProtoField.uint32("diwarp.rd.message", "Message number"),
    rd_offset = ProtoField.uint32("diwarp.rd.offset", "Offset"),
    rd_message_len = ProtoField.uint32("diwarp.rd.message.len", "Length of the message"),
    rd_job_key = ProtoField.uint64("diwarp.rd.jobkey", "Job key", base.HEX),
    rd_stag = ProtoField.uint32("diwarp.rd.stag", "STag", base.HEX),
    rd_to = ProtoField.uint64("diwarp.rd.to", "Tagged offset", base.HEX),
    rd_reason = ProtoField.uint8("diwarp.rd.verdict.reason", "Reason", base.DEC, REASONS),
    rd_timer = ProtoField.uint8("diwarp.rd.verdict.timer", "RNR timer"),
    rd_detail = ProtoField.uint16("diwarp.rd.verdict.detail", "Refused packet (low 16 bits)"),
    rd_stream = ProtoField.uint32("diwarp.rd.stream", "Stream"),
    rd_service = ProtoField.uint32("diwarp.rd.stream.service", "Service"),
    body = ProtoField.bytes("diwarp.body", "Body"),
    crc = ProtoField.uint32("diwarp.crc", "CRC32c", base.HEX),
    crc_status = ProtoField.string("diwarp.crc.status", "CRC32c status"),
}
diwarp.fields = f

local problem = ProtoExpert.new("diwarp.malformed", "A receiver drops this datagram", expert.group.MALFORMED,
    expert.severity.ERROR)
local bad_crc = ProtoExpert.new("diwarp.crc.bad", "Wrong CRC32c", expert.group.CHECKSUM,
    expert.severity.ERROR)
local spoofed = ProtoExpert.new("diwarp.spoofed", "The source QPN is not of the UDP source port",
    expert.group.PROTOCOL, expert.severity.WARN)
diwarp.experts = { problem, bad_crc, spoofed }

-- CRC32c (RFC 5044 section 4.4), reflected, one byte at a time.
local table_of_crc = {}
for byte = 0, 255 do
    local value = byte
    for _ = 1, 8 do
        local shifted = bit.rshift(value, 1)
        value = bit.band(value, 1) == 1 and bit.bxor(shifted, 0x82f63b78) or shifted
    end
    table_of_crc[byte] = value
end

local function crc32c(bytes)
    local crc = -1
    for at = 0, bytes:len() - 1 do
        local index = bit.band(bit.bxor(crc, bytes:get_index(at)), 0xff)
        crc = bit.bxor(bit.rshift(crc, 8), table_of_crc[index])
    end
    return bit.bnot(crc) % 0x100000000
end

-- The CRC that the datagram should have. It travels with its lowest byte first.
local function crc_is_right(buffer)
    local covered = buffer:len() - CRC
    return crc32c(buffer(0, covered):bytes()) == buffer(covered, CRC):le_uint(), covered
end

local function port_of(qpn)
    return bit.rshift(qpn, 8)
end

-- Adds a field; with a complaint, also what a receiver finds wrong with it.
local function add(tree, field, range, complaint)
    local item = tree:add(field, range)
    if complaint then
        item:add_proto_expert_info(problem, complaint)
    end
    return item
end

local function dissect_error(body, tree, summary)
    add(tree, f.layer, body(0, 1))
    add(tree, f.etype, body(0, 1))
    local item = add(tree, f.code, body(1, 1))
    add(tree, f.error_zero, body(2, 2))
    local name = ERRORS[body(0, 2):uint()] or string.format("error %04x", body(0, 2):uint())
    item:append_text(" (" .. name .. ")")
    table.insert(summary, name)
end

local function dissect_message(body, tree, summary)
    if body:len() < DDP then
        add(tree, f.body, body, "Shorter than a DDP header")
        return
    end
    local ddp = tree:add(f.ddp, body(0, DDP))
    local control, opcode = body(0, 1):uint(), bit.band(body(1, 1):uint(), 0x0f)
    local is_error = opcode == ERROR
    add(ddp, f.tagged, body(0, 1), bit.band(control, 0x80) ~= 0 and "Tagged segment")
    add(ddp, f.last, body(0, 1), bit.band(control, 0x40) == 0 and "Not the whole message")
    add(ddp, f.ddp_reserved, body(0, 1))
    add(ddp, f.dv, body(0, 1), bit.band(control, 3) ~= 1 and "Another DDP version")
    add(ddp, f.rv, body(1, 1), bit.rshift(body(1, 1):uint(), 6) ~= 1 and "Another RDMAP version")
    add(ddp, f.rdmap_reserved, body(1, 1))
    local is_known = is_error or opcode == SEND or opcode == SEND_SE
    add(ddp, f.opcode, body(1, 1), not is_known and "Not an opcode of the unreliable service")
    table.insert(summary, 1, OPCODES[opcode] or string.format("Opcode %d", opcode))
    if bit.band(control, 0x80) ~= 0 then
        add(tree, f.payload, body(2))
        return
    end
    add(ddp, f.invalidate, body(2, 4))
    add(ddp, f.qn, body(6, 4), body(6, 4):uint() ~= (is_error and 2 or 0) and "Another queue")
    add(ddp, f.msn, body(10, 4))
    add(ddp, f.mo, body(14, 4), body(14, 4):uint() ~= 0 and "Message offset is not 0")
    table.insert(summary, string.format("msn=%d", body(10, 4):uint()))
    local len = body:len() - DDP
    if is_error and len == 4 then
        dissect_error(body(DDP, 4), tree, summary)
        return
    end
    table.insert(summary, string.format("len=%d", len))
    if len > 0 then
        add(tree, f.payload, body(DDP), is_error and "An Error Message has 4 bytes")
    elseif is_error then
        ddp:add_proto_expert_info(problem, "An Error Message has 4 bytes")
    end
end

local function dissect_lookup(body, tree, kind, summary)
    if body:len() < 16 then
        add(tree, f.body, body, "Shorter than a lookup")
        return
    end
    local is_request = kind == 1
    if is_request then
        add(tree, f.space, body(0, 2))
        add(tree, f.service, body(2, 2))
        table.insert(summary, string.format("port=%d", body(2, 2):uint()))
    else
        add(tree, f.status, body(0, 2))
        add(tree, f.lookup_reserved, body(2, 2))
        local status = body(0, 2):uint()
        table.insert(summary, STATUSES[status] or string.format("Status %d", status))
    end
    add(tree, f.lookup_reserved, body(4, 3))
    local data_len, there = body(7, 1):uint(), body:len() - 16
    local too_much = data_len > (is_request and 180 or 136) and "More private data than the limit"
    add(tree, f.data_len, body(7, 1), too_much or data_len > there and "More private data than there is")
    add(tree, f.cookie, body(8, 8))
    data_len = math.min(data_len, there)
    if data_len > 0 then
        add(tree, f.private_data, body(16, data_len))
    end
    if there > data_len then
        add(tree, f.padding, body(16 + data_len))
    end
    if is_request and HEADER + body:len() + CRC < 176 then
        tree:add_proto_expert_info(problem, "A Lookup Request has at least 176 bytes")
    end
end

-- A part has the header's first two words, and no CRC: its datagram has one.
local function dissect_part(buffer, tree, summary)
    local length, offset, there = buffer(12, 2):uint(), buffer(14, 2):uint(), buffer:len() - HEADER
    add(tree, f.qkey, buffer(8, 4))
    add(tree, f.part_length, buffer(12, 2))
    local is_odd = there == 0 or offset >= length or offset % there ~= 0
    add(tree, f.part_offset, buffer(14, 2), is_odd and "No part begins there")
    add(tree, f.part_number, buffer(16, 4))
    if is_odd then
        return
    end
    local own = math.min(there, length - offset)
    add(tree, f.part_bytes, buffer(HEADER, own))
    if own < there then
        add(tree, f.part_padding, buffer(HEADER + own))
    end
    local count = math.ceil(length / there)
    table.insert(summary, string.format("Part %d of %d number=%d", offset / there + 1, count, buffer(16, 4):uint()))
end

-- All of it is shown: whoever reads the network has it anyway, and it is worth nothing at another port.
local function dissect_proof(body, tree, kind)
    if body:len() ~= 24 then
        add(tree, f.body, body, "A proof has 48 bytes")
        return
    end
    add(tree, f.token, body(0, 8))
    local has_cookie = kind == PROOF_REQUEST and body(8, 16):bytes():tohex() ~= string.rep("0", 32)
    add(tree, f.proof_made, body(8, 8)):append_text(has_cookie and " (not used in a request)" or "")
    add(tree, f.proof_hash, body(16, 8))
end

local function dissect_memory(body, tree)
    if body:len() ~= 48 then
        add(tree, f.body, body, "What is said about memory has 72 bytes")
        return
    end
    add(tree, f.memory_token, body(0, 16))
    add(tree, f.memory_name, body(16, 16))
    add(tree, f.memory_word, body(32, 16))
end

-- A DDP header and its payload. Returns nothing; what is too short is flagged.
local function dissect_rd_ddp(rest, tree, summary)
    local tagged = rest:len() > 0 and rest(0, 1):uint() >= 0x80
    local header = tagged and 14 or DDP
    if rest:len() < header then
        tree:add_proto_expert_info(problem, "Shorter than a DDP header")
        return
    end
    local ddp = tree:add(f.ddp, rest(0, header))
    add(ddp, f.tagged, rest(0, 1))
    add(ddp, f.last, rest(0, 1))
    add(ddp, f.dv, rest(0, 1), bit.band(rest(0, 1):uint(), 3) ~= 1 and "Another DDP version")
    add(ddp, f.opcode, rest(1, 1))
    local opcode = bit.band(rest(1, 1):uint(), 0x0f)
    table.insert(summary, OPCODES[opcode] or string.format("Opcode %d", opcode))
    if tagged then
        add(ddp, f.rd_stag, rest(2, 4))
        add(ddp, f.rd_to, rest(6, 8))
    else
        add(ddp, f.qn, rest(6, 4))
        add(ddp, f.msn, rest(10, 4))
        add(ddp, f.mo, rest(14, 4))
    end
    table.insert(summary, string.format("len=%d", rest:len() - header))
    if rest:len() > header then
        add(tree, f.payload, rest(header))
    end
end

-- A segment of an RDMA Write-Record.
local function dissect_record(body, tree, summary)
    if body:len() < RECORD_HEADER then
        add(tree, f.body, body, "Shorter than the header of a record")
        return
    end
    add(tree, f.rd_message, body(0, 4))
    add(tree, f.rd_offset, body(4, 4))
    add(tree, f.rd_message_len, body(8, 4))
    add(tree, f.rd_job_key, body(12, 8))
    table.insert(summary, string.format("msg=%d %d of %d", body(0, 4):uint(), body(4, 4):uint(), body(8, 4):uint()))
    if body:len() > RECORD_HEADER then
        dissect_rd_ddp(body(RECORD_HEADER), tree, summary)
    else
        tree:add_proto_expert_info(problem, "Shorter than a DDP header")
    end
end

local function dissect_rd_segment(chunk, tree, flags, summary)
    local has = function(flag) return bit.band(flags, flag) ~= 0 end
    local behind = chunk(4, 1):uint() * 256 + chunk(8, 1):uint()
    tree:add(f.rd_behind, chunk(4, 5), behind):append_text(has(0x20) and "" or " (not used)")
    add(tree, f.source, chunk(5, 3))
    add(tree, f.destination, chunk(9, 3))
    add(tree, f.rd_message, chunk(12, 4))
    table.insert(summary, string.format("msg=%d", chunk(12, 4):uint()))
    local at = 16
    -- The fields that the flags announce: whether, bytes, what to do.
    local fields = {
        { not has(0x40), 8, function(range)
            add(tree, f.rd_offset, range(0, 4))
            add(tree, f.rd_message_len, range(4, 4))
        end },
        { has(0x80), 4, function(range) add(tree, f.qkey, range) end },
        { has(0x02), 4, function(range) add(tree, f.immediate, range) end },
        { has(0x01), 8, function(range) add(tree, f.rd_job_key, range) end },
    }
    for _, field in ipairs(fields) do
        if field[1] then
            if chunk:len() < at + field[2] then
                tree:add_proto_expert_info(problem, "A chunk is shorter than its fields")
                return
            end
            field[3](chunk(at, field[2]))
            at = at + field[2]
        end
    end
    if not has(0x80) and bit.band(flags, 0x43) ~= 0 then
        tree:add_proto_expert_info(problem, "Flags of a first segment in another")
    end
    if chunk:len() == at then
        tree:add_proto_expert_info(problem, "Shorter than a DDP header")
    else
        dissect_rd_ddp(chunk(at), tree, summary)
    end
end

local function dissect_rd_ack(chunk, tree, flags, summary)
    add(tree, f.rd_acked, chunk(4, 4))
    add(tree, f.rd_delay, chunk(8, 2))
    add(tree, f.rd_blind, chunk(10, 2))
    add(tree, f.rd_credit, chunk(12, 2))
    add(tree, f.rd_floor, chunk(16, 4))
    table.insert(summary, string.format("%d floor=%d", chunk(4, 4):uint(), chunk(16, 4):uint()))
    local packets, messages = chunk(14, 1):uint(), chunk(15, 1):uint()
    local at = 20
    local has_marks = bit.band(flags, 0x80) ~= 0
    if packets == 0 or packets + messages > 32 then
        tree:add_proto_expert_info(problem, "Too many ranges, or none")
    elseif chunk:len() < at + (has_marks and 4 or 0) + 4 * (packets + messages) then
        tree:add_proto_expert_info(problem, "A chunk is shorter than its fields")
    else
        if has_marks then
            add(tree, f.rd_ce, chunk(at, 4))
            at = at + 4
        end
        for number = 1, packets + messages do
            local kind = number > packets and " of messages" or " of packets"
            add(tree, f.rd_gap, chunk(at, 2)):append_text(kind)
            add(tree, f.rd_length, chunk(at + 2, 2)):append_text(kind)
            at = at + 4
        end
    end
end

-- The other chunks, by their type.
local RD_CHUNKS = {
    [1] = dissect_rd_ack,
    [2] = dissect_rd_segment,
    [3] = function(chunk, tree, flags)
        add(tree, f.rd_stream, chunk(4, 4))
        add(tree, f.rd_offset, chunk(8, 4))
        if bit.band(flags, 0x80) ~= 0 and chunk:len() >= 16 then
            add(tree, f.rd_service, chunk(12, 4))
        end
    end,
    [4] = function(chunk, tree, _, summary)
        add(tree, f.rd_message, chunk(4, 4))
        add(tree, f.rd_reason, chunk(8, 1))
        add(tree, f.rd_timer, chunk(9, 1))
        add(tree, f.rd_detail, chunk(10, 2))
        local reason = REASONS[chunk(8, 1):uint()] or "unassigned reason"
        table.insert(summary, string.format("msg=%d %s", chunk(4, 4):uint(), reason))
    end,
    [5] = function(chunk, tree) add(tree, f.destination, chunk(4, 3)) end,
    [6] = function(chunk, tree)
        add(tree, f.rd_home, chunk(4, 2))
        add(tree, f.rd_cookie_key, chunk(8, 8))
        add(tree, f.rd_cookie_made, chunk(16, 8))
    end,
    [8] = function(chunk, tree) add(tree, f.rd_floor, chunk(4, 4)) end,
    [9] = function(chunk, tree) add(tree, f.rd_stream, chunk(4, 4)) end,
    [10] = function(chunk, tree) add(tree, f.rd_stream, chunk(4, 4)) end,
    [11] = function(chunk, tree, _, summary)
        for at = 4, chunk:len() - 4, 4 do
            add(tree, f.rd_message, chunk(at, 4))
            table.insert(summary, chunk(at, 4):uint())
        end
    end,
}

local function dissect_rd_chunks(body, tree, summary)
    local at = 0
    while at < body:len() do
        local len = body:len() - at >= 4 and body(at + 2, 2):uint() or 0
        if len < 4 or at + len > body:len() then
            add(tree, f.body, body(at), "A chunk is shorter than its header, or longer than the packet")
            return
        end
        local chunk, code = body(at, len), body(at, 1):uint()
        local name = CHUNKS[code] or string.format("chunk 0x%02x", code)
        local branch = tree:add(f.rd_chunk, chunk)
        branch:append_text(": " .. name)
        local unknown = not CHUNKS[code] and code >= 0x80 and "An unknown chunk that must be known"
        add(branch, f.rd_type, body(at, 1), unknown)
        add(branch, f.rd_flags, body(at + 1, 1))
        add(branch, f.rd_len, body(at + 2, 2))
        table.insert(summary, name)
        if CHUNKS[code] and len < SHORTEST[code] then
            branch:add_proto_expert_info(problem, "A chunk is shorter than its fields")
        elseif RD_CHUNKS[code] then
            RD_CHUNKS[code](chunk, branch, body(at + 1, 1):uint(), summary)
        end
        at = at + len
    end
end

-- What two processes say before they have an exchange. Returns the chunks behind it, if there are any.
local function dissect_rd_contact(body, tree, kind)
    if kind == 1 and body:len() >= 72 then
        add(tree, f.rd_highest, body(0, 1))
        add(tree, f.rd_features, body(4, 4))
        add(tree, f.padding, body(8))
    elseif kind == 2 and body:len() >= 28 then
        add(tree, f.rd_highest, body(0, 1))
        add(tree, f.rd_home, body(2, 2))
        add(tree, f.rd_features, body(4, 4))
        add(tree, f.rd_cookie_key, body(8, 8))
        add(tree, f.rd_cookie_made, body(16, 8))
        add(tree, f.rd_credit, body(24, 2))
        add(tree, f.rd_largest, body(26, 2))
    elseif kind == 3 and body:len() >= RD_OPEN then
        add(tree, f.rd_token, body(0, 8))
        add(tree, f.rd_cookie_made, body(8, 8))
        add(tree, f.rd_asked, body(16, 2))
        add(tree, f.rd_version, body(18, 1))
        add(tree, f.rd_features, body(20, 4))
        return body:len() > RD_OPEN and body(RD_OPEN) or nil
    else
        add(tree, f.body, body, kind > 3 and "It has no body" or "Shorter than its fields")
    end
end

-- A packet of the reliable service.
local function dissect_rd(buffer, pinfo, tree)
    local kind, summary = bit.band(buffer(4, 1):uint(), 0x0f), {}
    local source, destination = buffer(1, 2):uint(), buffer(5, 2):uint()
    add(tree, f.version, buffer(0, 1))
    local item = add(tree, f.rd_source, buffer(1, 2))
    if source ~= pinfo.src_port then
        item:add_proto_expert_info(spoofed)
    end
    add(tree, f.rd_version, buffer(3, 1), buffer(3, 1):uint() ~= RD_VERSION and "Another RD version")
    local flags = add(tree, f.flags, buffer(4, 1))
    add(flags, f.immediate_flag, buffer(4, 1),
        buffer(4, 1):uint() >= 0x80 and "Immediate data in the header of a reliable datagram")
    add(flags, f.reliable_flag, buffer(4, 1))
    add(flags, f.rd_kind, buffer(4, 1), not RD_KINDS[kind] and "Unassigned kind")
    add(tree, f.rd_destination, buffer(5, 2))
    add(tree, f.rd_key, buffer(8, 8))
    add(tree, f.rd_number, buffer(16, 4))
    local is_right, covered = crc_is_right(buffer)
    if covered > HEADER then
        local body = buffer(HEADER, covered - HEADER)
        if kind ~= 0 then
            body = dissect_rd_contact(body, tree, kind)
        end
        if body then
            dissect_rd_chunks(body, tree, summary)
        end
    elseif kind >= 1 and kind <= 3 then
        tree:add_proto_expert_info(problem, "Shorter than its fields")
    end
    item = tree:add_le(f.crc, buffer(covered, CRC))
    tree:add(f.crc_status, buffer(covered, CRC), is_right and "Good" or "Bad"):set_generated()
    if not is_right then
        item:add_proto_expert_info(bad_crc)
        table.insert(summary, "[wrong CRC]")
    end
    local name = RD_KINDS[kind] or string.format("kind %d", kind)
    local number = (kind == 0 or kind == 3) and string.format(" pn=%d", buffer(16, 4):uint()) or ""
    table.insert(summary, 1, string.format("RD %s %d -> %d%s", name, source, destination, number))
    pinfo.cols.info = table.concat(summary, " ")
    return buffer:len()
end

function diwarp.dissector(buffer, pinfo, root)
    pinfo.cols.protocol = "D-iWARP"
    local tree = root:add(diwarp, buffer())
    if buffer:len() < 1 or buffer(0, 1):uint() ~= VERSION then
        add(tree, f.body, buffer(), "Another version")
        return buffer:len()
    end
    if buffer:len() < HEADER + CRC then
        add(tree, f.body, buffer(), "Shorter than its header and its CRC")
        return buffer:len()
    end
    local flags = buffer(4, 1):uint()
    if bit.band(flags, 0x40) ~= 0 then
        return dissect_rd(buffer, pinfo, tree)
    end
    local kind, summary = bit.band(flags, 0x0f), {}
    local source, destination = buffer(1, 3):uint(), buffer(5, 3):uint()

    add(tree, f.version, buffer(0, 1))
    local item = add(tree, f.source, buffer(1, 3))
    local is_proof = kind == PROOF_REQUEST or kind == PROOF_REPLY
    local is_memory = kind >= MEMORY_REQUEST and kind <= MEMORY_BEGINS
    local is_offer = kind == PARTS_REQUEST or kind == PARTS_REPLY
    local has_numbers = kind == 0 or kind == RECORD or kind == PART or is_proof or is_memory or is_offer
    if has_numbers then
        item:append_text(string.format(" (port %d, slot %d)", port_of(source), bit.band(source, 0xff)))
        if port_of(source) ~= pinfo.src_port then
            item:add_proto_expert_info(spoofed)
        end
    end
    local at = buffer(4, 1)
    local flag_tree = add(tree, f.flags, at)
    local what = is_proof and "Immediate data in a proof" or is_memory and "Immediate data about memory"
        or "Immediate data in a lookup"
    local may_have = kind == 0 or kind == RECORD
    add(flag_tree, f.immediate_flag, at, not may_have and flags >= 0x80 and what)
    add(flag_tree, f.reliable_flag, at)
    add(flag_tree, f.reserved_flags, at, bit.band(flags, 0x30) ~= 0 and "Reserved flags are not 0")
    add(flag_tree, f.kind, at, not KINDS[kind] and "Unassigned kind")
    item = add(tree, f.destination, buffer(5, 3))
    if destination == GROUP then
        item:append_text(" (group)")
    elseif has_numbers then
        local slot = bit.band(destination, 0xff)
        item:append_text(string.format(" (port %d, slot %d)", port_of(destination), slot))
    end
    if kind == PART then
        dissect_part(buffer, tree, summary)
        table.insert(summary, 1, string.format("0x%06x -> 0x%06x", source, destination))
        pinfo.cols.info = table.concat(summary, " ")
        return buffer:len()
    end
    add(tree, f.qkey, buffer(8, 4))
    if is_offer then
        add(tree, f.parts_token, buffer(12, 8))
    else
        add(tree, f.immediate, buffer(12, 4))
        add(tree, has_numbers and f.incarnation or f.transaction, buffer(16, 4))
    end

    local is_right, covered = crc_is_right(buffer)
    if covered == HEADER and is_proof then
        tree:add_proto_expert_info(problem, "A proof has 48 bytes")
    elseif covered > HEADER then
        local body = buffer(HEADER, covered - HEADER)
        if kind == 0 then
            dissect_message(body, tree, summary)
        elseif kind == RECORD then
            dissect_record(body, tree, summary)
        elseif is_proof then
            dissect_proof(body, tree, kind)
        elseif is_memory then
            dissect_memory(body, tree)
        elseif is_offer then
            add(tree, f.part_padding, body, kind == PARTS_REPLY and "A Parts Reply has 24 bytes")
        elseif KINDS[kind] then
            dissect_lookup(body, tree, kind, summary)
        else
            add(tree, f.body, body)
        end
    end
    item = tree:add_le(f.crc, buffer(covered, CRC))
    tree:add(f.crc_status, buffer(covered, CRC), is_right and "Good" or "Bad"):set_generated()
    if not is_right then
        item:add_proto_expert_info(bad_crc)
        table.insert(summary, "[wrong CRC]")
    end
    if is_proof or is_memory or is_offer then
        table.insert(summary, 1, string.format("0x%06x -> 0x%06x %s", source, destination, KINDS[kind]))
    elseif kind == 0 or kind == RECORD then
        local to = destination == GROUP and "group" or string.format("0x%06x", destination)
        table.insert(summary, 1, string.format("0x%06x -> %s", source, to))
    else
        table.insert(summary, 1, KINDS[kind] or string.format("Kind %d", kind))
    end
    pinfo.cols.info = table.concat(summary, " ")
    return buffer:len()
end

-- No UDP port is ours, so datagrams are recognized by what they say: the version and the port of the source
-- QPN, or the version and a right CRC.
local function is_ours(buffer, pinfo)
    if buffer:len() < HEADER + CRC or buffer(0, 1):uint() ~= VERSION then
        return false
    end
    local kind = bit.band(buffer(4, 1):uint(), 0x0f)
    if bit.band(buffer(4, 1):uint(), 0x40) ~= 0 then
        return buffer(1, 2):uint() == pinfo.src_port and RD_KINDS[kind] ~= nil
    end
    local is_named = kind == 0 or kind >= PROOF_REQUEST and kind <= PARTS_REPLY
    if is_named and port_of(buffer(1, 3):uint()) == pinfo.src_port then
        return true
    end
    return KINDS[kind] ~= nil and (crc_is_right(buffer))
end

diwarp:register_heuristic("udp", function(buffer, pinfo, root)
    if not is_ours(buffer, pinfo) then
        return false
    end
    diwarp.dissector(buffer, pinfo, root)
    return true
end)
-- For "Decode As" and -d udp.port==PORT,diwarp.
DissectorTable.get("udp.port"):add_for_decode_as(diwarp)
