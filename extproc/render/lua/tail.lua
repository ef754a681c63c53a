-- The end of a streamed answer, seen on its way to the client: usage, finish reason, [DONE] and errors are noted; the
-- usage chunk is taken out where the client did not ask for it; a stream that just stops gets a word of why, and so
-- does one that ends with an error about our account, or with one that the caller's SDK would read past, in place of
-- that. `OURS`, the words of such errors, stands before this text.
--
-- A chunk that ends with a whole event and has nothing of interest passes untouched: that is nearly every one. Bytes
-- are held only while hiding, or where they may be an error, and then only an event that is not complete yet. Whatever
-- fails here, every byte goes on.
--
-- Until the answer has said something each event is read; from then on only those that matter. An event that ends in no
-- brace is read too, and noted where it is no JSON.
--
-- Not done: an event that was cut exactly behind a brace passes for a whole one. Streams whose lines end in a bare CR,
-- and events over 1 MiB, pass unread. A stream that stalls is ended by Envoy, without a word here: its record has a
-- flag. Of an error that has no member `error`, and comes in pieces, the first may have gone on before it is known for
-- one. Where an HTTP/2 upstream ends its stream with trailers Envoy offers no way to add bytes: a held, unfinished
-- event is lost with it, and so is the last word.

local LIMIT = 1048576
local BOUNDARY = "\n\r?\n"
local COLON = 58

local CUT = {
  openai = 'data: {"error": {"message": "The upstream ended its answer early. Please try again.", '
    .. '"type": "server_busy", "param": null, "code": "SERVER_OVERLOADED", "reason": "upstream_failed"}}\n\n',
  anthropic = 'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", '
    .. '"message": "The upstream ended its answer early. Please try again.", "reason": "upstream_failed"}}\n\n',
}

-- Whether `key` stands in `s` with `value`, a pattern, behind it.
local function says(s, key, value)
  local _, stop = find(s, key, 1, true)
  while stop do
    if find(s, value, stop + 1) then return true end
    _, stop = find(s, key, stop + 1, true)
  end
  return false
end

-- Whether nothing in `s` can be of interest. Quotes inside JSON strings are escaped, so that a quoted key only matches
-- where it is one; a false alarm costs time, nothing else.
local function dull(s)
  return not (
    says(s, '"finish_reason"', '^%s*:%s*"')
    or says(s, '"usage"', "^%s*:%s*{")
    or find(s, "error", 1, true)
    or find(s, '"stop_reason"', 1, true)
    or find(s, '"response"', 1, true)
    or find(s, "[DONE]", 1, true)
    or find(s, '"message', 1, true)
    or find(s, '"detail"', 1, true)
  )
end

-- The data lines of an event as one text, or nil. Gemini's errors come as bare JSON in place of an event: then that,
-- and true.
local function payload(event)
  local data
  for line in string.gmatch(event, "[^\r\n]+") do
    local value = match(line, "^data: ?(.*)$")
    if value then data = data and data .. "\n" .. value or value end
  end
  if not data and find(event, "^%s*%[?%s*{") then return event, true end
  return data, false
end

-- What only events say: Anthropic's and the Responses API's envelopes around the shapes of whole answers.
local function note_envelope(s, at, notes)
  local kind = word(s, at.type)
  if object(s, at.message) then note_usage(s, members(s, at.message).usage, notes) end
  if object(s, at.delta) then note_members(s, { stop_reason = members(s, at.delta).stop_reason }, notes) end
  if object(s, at.response) then note_members(s, (members(s, at.response)), notes) end
  if kind == "message_stop" then notes.done = "1" end
  local ended = kind and match(kind, "^response%.(%l+)$")
  if ENDS[ended] then
    notes.done = "1"
    notes.finish = notes.finish or ended
  end
end

-- Whether an event's name says that it is an error.
local function is_named_error(event) return find("\n" .. event, "[\r\n]event: ?error[\r\n]") ~= nil end

-- Notes what the event with members `at` says, and returns the error in it, if there is one.
local function note_event(s, at, notes, named)
  local before = notes.error
  notes.error = nil
  note_members(s, at, notes)
  note_envelope(s, at, notes)
  local error = notes.error or ((named or flat_error(s, at)) and words_of(s, at)) or nil
  notes.error = error or before
  return error
end

-- Whether a caller's SDK raises the error in the event with members `at`. OpenAI's looks for its member `error` alone,
-- or hands the event on in the Responses API; Anthropic's for the event's name.
local function is_raised(state, s, at, named)
  if state.dialect == "anthropic" then return named end
  if state.dialect ~= "openai" or object(s, at.error) or word(s, at.error) or at.response then return true end
  return state.responses and word(s, at.type) == "error"
end

-- Whether the line that ends before `i` ends in a brace.
local function braced(s, i)
  local c = byte(s, i - 1)
  return c == 125 or (c == 13 and byte(s, i - 2) == 125)
end

-- Whether an error speaks of our account.
local function about_us(error)
  local kind, code = match(error or "", "^([^/]*)/(.*)$")
  return OURS[kind] or OURS[code] or false
end

-- Notes what an event says, and returns what may not go on of it: "usage" where it is the chunk that has usage and
-- nothing else, "error" where it speaks of our account or is one that the client would not raise, "torn" where it is
-- not there to its end; else nil. `ended`: the event is whole, so that it has to be JSON.
local function read(state, event, ended)
  local s, bare = payload(event)
  local notes, named = state.notes, is_named_error(event)
  local start = s and match(s, "^%s*()")
  if not s or start > #s then return nil end
  if find(s, "^%[DONE%]", start) then
    notes.done = "1"
    return nil
  end
  local list = match(s, "^%[%s*(){", start)
  local at, stop = members(s, list or start)
  if list then stop = at.error and stop and match(s, "^%s*%]()", stop) end
  if bare and not (at.error or flat_error(s, at)) then return not (stop or ended) and "torn" or nil end
  if not stop or find(s, "%S", stop) then
    if not ended then return "torn" end
    if named then notes.error = "-/" .. (code_of(sub(s, start, start + 1024)) or "-") else notes.bad = "json" end
    return named and "error" or nil
  end
  local error = note_event(s, at, notes, named)
  if error and (bare or list or about_us(error) or not is_raised(state, s, at, named)) then return "error" end
  state.says = state.says or event_says(s, at)
  return object(s, at.usage) and at.choices and find(s, "^%[%s*%]", at.choices) and "usage" or nil
end

-- Counts events. The number is told in steps of an eighth.
local function count(state, events)
  state.events = state.events + events
  if state.events < state.due then return end
  state.notes.events = state.events
  state.due = state.events + math.max(1, math.floor(state.events / 8))
end

-- What goes on in place of an event that may not; `begun`: its first bytes that have gone on already.
local function instead(state, verdict, begun)
  if verdict == "error" then return begun .. (begun ~= "" and "\n\n" or "") .. (CUT[state.dialect] or "") end
  return ""
end

-- Reads the whole events of `s`, of which the first `known` bytes are known to have no boundary. Returns what may go on
-- of them, and the unfinished rest.
local function read_events(state, s, known)
  local kept, from, pos = {}, 1, 1
  local start, stop = find(s, BOUNDARY, math.max(1, known - 1))
  while stop do
    local event = sub(s, pos, stop)
    if byte(s, pos) ~= COLON then count(state, 1) end
    local matters = not state.says or not braced(s, start) or not dull(event)
    local verdict = matters and read(state, event, true)
    if verdict == "error" or (verdict and state.hide) then
      kept[#kept + 1] = sub(s, from, pos - 1)
      kept[#kept + 1] = instead(state, verdict, pos == 1 and sub(s, 1, state.sent) or "")
      from = stop + 1
    end
    pos = stop + 1
    start, stop = find(s, BOUNDARY, pos)
  end
  kept[#kept + 1] = sub(s, from, pos - 1)
  return table.concat(kept), sub(s, pos)
end

-- What an error begins with where it has no member `error`.
local FIRST = { code = true, detail = true, message = true, status = true, statusCode = true }

local function may_be_error(rest)
  if find(rest, '"error"', 1, true) or find(rest, "^event: ?error") then return true end
  return FIRST[match(rest, '^data: ?{%s*"(%a+)"')] or false
end

-- What goes on now of `kept`, which may, and of `rest`, an event that is not complete; of that, as far as it came
-- before, `state.sent` bytes have gone on already.
local function release(state, kept, rest)
  local sent = state.sent
  if state.hide or may_be_error(rest) then
    if kept ~= "" then state.sent = 0 end
    return sub(kept, sent + 1)
  end
  state.sent = #rest
  return sub(kept .. rest, sent + 1)
end

-- Passes an event that is too long to read. Returns what goes on, and what follows the event, if that came.
local function pass_long(state, chunk)
  local edge = state.edge
  local _, stop = find(edge .. chunk, BOUNDARY)
  if not stop then
    state.edge = sub(edge .. chunk, -2)
    return chunk, nil
  end
  state.edge = nil
  return sub(chunk, 1, stop - #edge), sub(chunk, stop - #edge + 1)
end

-- Whether nothing in a chunk matters, and it ends where an event does. Its events are counted if so.
local function all_dull(state, chunk)
  if not state.says or state.carry ~= "" or not find(chunk, "\n\r?\n$", -3) or not dull(chunk) then return false end
  local pos, events = 1, 0
  repeat
    local start, stop = find(chunk, BOUNDARY, pos)
    if not start or not braced(chunk, start) then return false end
    if byte(chunk, pos) ~= COLON then events = events + 1 end
    pos = stop + 1
  until pos > #chunk
  count(state, events)
  return true
end

-- The start of a stream without the mark of its byte order, behind which clients read past the first event; nil where
-- it is held because it may be half of that.
local function begun(state, chunk)
  local s = state.carry .. chunk
  state.fresh = #s < #MARK and sub(MARK, 1, #s) == s
  state.carry = state.fresh and s or ""
  return not state.fresh and unmarked(s) or nil
end

-- Takes a chunk in and returns the bytes to send on in its place.
local function take(state, chunk)
  local passed = ""
  if state.fresh then
    chunk = begun(state, chunk)
    if not chunk then return "" end
  end
  if state.edge then
    passed, chunk = pass_long(state, chunk)
    if not chunk then return passed end
  end
  if all_dull(state, chunk) then return passed .. chunk end
  local kept, rest = read_events(state, state.carry .. chunk, #state.carry)
  local long, bare = #rest > LIMIT, find(rest, "\r[^\n]") ~= nil
  if long or bare then
    state.unread, state.blind, state.edge = true, bare, long and sub(rest, -2) or nil
    kept, rest = kept .. rest, ""
  end
  state.carry = rest
  return passed .. release(state, kept, rest)
end

-- What is still to be sent when the stream has ended: the held rest, and an error where the answer is not complete.
local function last_words(state)
  local notes, rest = state.notes, state.carry
  local verdict = rest ~= "" and read(state, rest, false)
  local out = sub(rest, state.sent + 1)
  if verdict == "error" then
    out = sub(instead(state, verdict, sub(rest, 1, state.sent)), state.sent + 1)
  elseif (verdict == "usage" and state.hide) or (verdict == "torn" and may_be_error(rest)) then
    out = ""
  end
  if state.events > 0 then notes.events = state.events end
  if state.unread or notes.error or not CUT[state.dialect] then return out end
  if notes.finish or notes.done then
    notes.bad = notes.bad or fault_of(notes, state.says, state)
    return out
  end
  notes.cut = "1"
  return out .. ((out ~= "" or state.sent > 0) and "\n\n" or "") .. CUT[state.dialect]
end

-- Runs a step of reading. Where it fails, `bytes` and what is held go on as they came, and reading ends for this
-- stream.
local function safely(handle, state, step, bytes)
  if state.blind then return bytes end
  local ok, out = pcall(step, state, bytes)
  if ok then return out end
  handle:logErr("response tail: " .. tostring(out))
  state.blind = true
  return sub(state.carry, state.sent + 1) .. bytes
end

local function begin(handle)
  local headers = handle:headers()
  if headers:get(":status") ~= "200" then return nil end
  if not find(headers:get("content-type") or "", "text/event-stream", 1, true) then return nil end
  local route = handle:streamInfo():dynamicMetadata():get("llm.route")
  if not route or not route.ticket then return nil end
  headers:remove("content-length")
  local state = { hide = route.hide_usage == true, dialect = route.dialect, cap = route.cap, stops = route.stops }
  state.results = route.results
  state.responses, state.fresh = find(route.path or "", "^/v1/responses") ~= nil, true
  state.carry, state.sent, state.events, state.due, state.notes, state.told = "", 0, 0, 1, {}, {}
  return state
end

function envoy_on_response(handle)
  local state = begin(handle)
  if not state then return end
  local last, sent = nil, ""
  for chunk in handle:bodyChunks() do
    local bytes = chunk:getBytes(0, chunk:length())
    last, sent = chunk, safely(handle, state, take, bytes)
    if sent ~= bytes then chunk:setBytes(sent) end
    tell(handle, state.notes, state.told)
  end
  local more = safely(handle, state, last_words, "")
  if last and more ~= "" then pcall(last.setBytes, last, sent .. more) end
  tell(handle, state.notes, state.told)
end
