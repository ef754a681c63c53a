-- One attempt at one upstream. On the way out: its path, its own model name, the time left. On the way back: what went
-- wrong, in a header for the attempts log, and whether the next upstream may do better; what a JSON answer used. What
-- is wrong with our account, or with this upstream, never reaches a caller: where nobody is left to ask, Envoy's own
-- words do.
--
-- All attempts of a request share one header map, so everything set here is set or removed by every upstream. The body
-- is fresh for each attempt. Before this text stand, for each upstream, `SELF` (name, prefix, owned, whether it runs in a
-- gate of the classic profile and which header has its key there, and the names of those whose window is wider) and
-- `ROWS`, what its provider's errors mean.
--
-- Not done: answers that are not priced in tokens are not read. The first event of a stream cannot be: Envoy's Lua sees
-- a body in parts only once the headers have gone on.

local function route_of(handle)
  return handle:streamInfo():dynamicMetadata():get("llm.route") or {}
end

-- The gateway's path as this upstream has it.
local function own_path(path)
  if find(path, "^/v1[/?]") or path == "/v1" then return SELF.prefix .. sub(path, 4) end
  return path
end

-- Puts this upstream's head over the first `width` bytes of the body, padded with spaces; the length stays.
local function put_head(handle, head, width)
  if #head > width then return handle:logErr("head of " .. SELF.name .. " is longer than " .. width) end
  local body = handle:body()
  if not body or body:length() < width then return end
  local own = head .. string.rep(" ", width - #head)
  if body:getBytes(0, width) ~= own then body:setBytes(own .. body:getBytes(width, body:length() - width)) end
end

-- Milliseconds left of the caller's deadline. Notes whether this attempt ends with it, so that it can be told as that:
-- what is then left is no time for anybody, were it only what was lost by rounding.
local function time_left(handle, route)
  local metadata, now = handle:streamInfo():dynamicMetadata(), tonumber(handle:timestamp())
  if not route.began_ms then metadata:set("llm.route", "began_ms", now) end
  local left = math.max(1, route.deadline_ms - (now - (route.began_ms or now)))
  if route.per_try_ms then metadata:set("llm.route", "late", route.per_try_ms >= left * 0.95 - 5) end
  return left
end

-- A key file mostly ends with a line break, which Envoys before 1.40 take for a part of the key: no upstream accepts it.
local function trim_key(headers)
  local key = SELF.key and headers:get(SELF.key)
  if key and find(key, "%s$") then headers:replace(SELF.key, (string.gsub(key, "%s+$", ""))) end
end

function envoy_on_request(handle)
  local route = route_of(handle)
  local headers = handle:headers()
  trim_key(headers)
  headers:replace(":path", own_path(route.path or headers:get(":path")))
  local left = route.deadline_ms and time_left(handle, route)
  if SELF.owned and left then
    headers:replace("x-request-timeout-ms", string.format("%d", left))
  else
    headers:remove("x-request-timeout-ms")
  end
  local head = route.heads and route.heads[SELF.name]
  if head then put_head(handle, head, route.width) end
end

-- A request that another upstream may take although nothing is wrong with this one.
local ELSEWHERE = { [404] = true, [413] = true }
local LENGTH_WORDS = {
  context_length_exceeded = true,
  exceed_context_size_error = true,
  request_too_large = true,
  string_above_max_length = true,
}

-- What a request that is too long is told in the message alone.
local LENGTH_TEXTS = {
  "context length",
  "context size",
  "context window",
  "exceed context limit",
  "input is too long",
  "max_model_len",
  "maximum model length",
  "maximum number of tokens allowed",
  "maximum prompt length",
  "prompt is too long",
  "too many tokens",
}
local LENGTH_STATUS = { [200] = true, [400] = true, [413] = true, [422] = true }

local function text_of(handle)
  local body = handle:body()
  return body and unmarked(body:getBytes(0, body:length())) or ""
end

-- The code that a message stands for, or nil.
local function code_in(message, status)
  local code = code_of(message)
  if code or not LENGTH_STATUS[status] then return code end
  message = string.lower(message)
  for _, text in ipairs(LENGTH_TEXTS) do
    if find(message, text, 1, true) then return "context_length_exceeded" end
  end
  return nil
end

-- Name of an AWS exception, as its header or `__type` has it: after a namespace, before an address.
local function exception(text)
  local name = text and match(text, "^[%w%._#]+")
  return name and match(name, "[%w_]+$")
end

-- The quota that Gemini says is used up; of several the one that is renewed last.
local function quota_in(s)
  local found
  for id in string.gmatch(s, '"quotaId"%s*:%s*"([%w_%-]+)"') do
    if not found or find(id, "PerDay", 1, true) then found = id end
  end
  return found
end

-- Type and code of an error body, in whichever of the usual shapes; a dash for what it does not say.
local function complaint(handle, s, status)
  local whole = members(s, match(s, "^%s*%[?%s*()"))
  local at = object(s, whole.error) and members(s, whole.error) or whole
  local kind = exception(handle:headers():get("x-amzn-errortype")) or exception(string_at(s, whole.__type))
  kind = kind or word(s, at.type) or word(s, at.status) or word(s, at.error_type) or word(s, whole.error_type)
  kind = kind or match(string_at(s, whole.error), "^[%w_%.%-]+$")
  local code = quota_in(s)
  if not code and object(s, at.details) then code = word(s, members(s, at.details).error_code) end
  code = code or word(s, at.code)
  local message = string_at(s, at.message)
  if message == "" then message = string_at(s, whole.error or whole.detail) end
  if not LENGTH_WORDS[code] then code = code_in(message, status) or code end
  return kind or "-", code or "-"
end

-- What an error means, by the provider's own rows and the general ones (`dialects/errors.py`).
local function class_of(status, kind, code)
  kind, code = string.gsub(kind, "^%-", ""), string.gsub(code, "^%-", "")
  for _, row in ipairs(ROWS) do
    if (row[1] == 0 or row[1] == status) and find(kind, row[2]) and find(code, row[3]) then
      return row[4]
    end
  end
  return status >= 400 and status < 500 and "client" or "overload"
end

-- How long to wait, where only the body says it: Gemini's RetryInfo, and the words of OpenAI and Azure.
local function wait_in(s)
  local words = match(s, '"retryDelay"%s*:%s*"(%d+%.?%d*s)"') or match(s, "try again in (%d[%d.hm]*s)")
  if words then return sub(words, 1, 32) end
  local seconds = match(s, "retry after (%d+) seconds")
  return seconds and sub(seconds, 1, 9) .. "s"
end

-- Lets the router take this answer for a failure; what it really was stays for the log. Where the only upstream of the
-- order may be asked a second time, that is for 503 only, and what is said here would be said again.
local function next_please(handle, status)
  local headers = handle:headers()
  headers:replace("x-tg-status", tostring(status))
  headers:replace(":status", route_of(handle).again and "502" or "503")
end

-- The answer goes to the caller: what it says about the limits of our account goes to the service instead. Behind a gate
-- admission reads these headers itself, and takes them away.
local function keep_limits(handle)
  if SELF.gate then return end
  local headers, found = handle:headers(), {}
  for name, value in pairs(headers) do
    if find(name, "ratelimit-", 1, true) or find(name, "tokenlimit-", 1, true) then found[name] = sub(value, 1, 64) end
  end
  if not next(found) then return end
  local metadata = handle:streamInfo():dynamicMetadata()
  for name, value in pairs(found) do
    headers:remove(name)
    metadata:set("llm.limits", name, value)
  end
end

-- Whether this request, which is at fault itself, may yet be served by an upstream that comes later in the order. The
-- order stands: those between are asked too.
local function elsewhere(status, kind, code, order)
  local too_long = LENGTH_WORDS[kind] or LENGTH_WORDS[code]
  if not too_long and not ELSEWHERE[status] then return false end
  for i = #order, 1, -1 do
    local name = order[i].name
    if name == SELF.name then return false end
    if not too_long or SELF.wider[name] then return true end
  end
  return false
end

local function order_ends_here(order) return #order == 0 or order[#order].name == SELF.name end

-- Whether an upstream behind the first says that it cannot do what was asked. The first can, for all we know: what is
-- wrong is that it failed, which passes.
local CANNOT = { "prefill", "does not support", "not supported" }
local function only_first(text, order)
  if #order == 0 or order[1].name == SELF.name then return false end
  local said = string.lower(sub(text, 1, 1024))
  for _, words in ipairs(CANNOT) do
    if find(said, words, 1, true) then return true end
  end
  return false
end

-- That a model is not here may be our mistake or the caller's, and tells nobody anything.
local READABLE = { client = true, missing = true }
local ABOUT_US = { terminal = true, credential = true, forbidden = true }

-- An answer that says what is wrong. Only what is wrong with the request itself is the caller's to read.
local function refused(handle, text, status, order)
  local kind, code = complaint(handle, text, status)
  local headers, wait = handle:headers(), status == 429 and wait_in(text)
  headers:replace("x-tg-err", kind .. "/" .. code)
  if wait then headers:replace("x-tg-wait", wait) else headers:remove("x-tg-wait") end
  local class = class_of(status, kind, code)
  if status >= 500 or status == 429 then
    -- The router tries the next by itself; the same one a second time never for what is wrong with our account.
    if ABOUT_US[class] then next_please(handle, status) end
    return
  end
  if not READABLE[class] or elsewhere(status, kind, code, order) or only_first(text, order) then
    return next_please(handle, status)
  end
  if status < 400 then headers:replace(":status", "400") end
  keep_limits(handle)
end

-- An error in place of an answer, under a status of success; the status that it names itself counts.
local function refused_politely(handle, text, status, order)
  local at = members(text, match(text, "^%s*%[?%s*()"))
  at = object(text, at.error) and members(text, at.error) or at
  local own = number(text, at.code) or number(text, at.status) or number(text, at.statusCode)
  if own and own >= 400 and own < 600 then
    handle:headers():replace(":status", tostring(own))
    status = own
  end
  return refused(handle, text, status, order)
end

-- A failure that looks like success. The next upstream may do better; the last one's answer is all there is, if it is
-- one.
local function malformed(handle, bad, status)
  handle:headers():replace("x-tg-err", "malformed/" .. bad)
  next_please(handle, status)
end

-- A gate's metadata is its own: there notes go in a header, which admission reads and takes away.
local function tell_service(handle, notes)
  if not SELF.gate then return tell(handle, notes, {}) end
  local words = {}
  for key, value in pairs(notes) do
    words[#words + 1] = key .. "=" .. (type(value) == "number" and string.format("%.0f", value) or value)
  end
  handle:headers():replace("x-tg-tail", table.concat(words, ";"))
end

local function answered(handle, route, status, order)
  local s, is_last = text_of(handle), order_ends_here(order)
  local at, stop = members(s, match(s, "^%s*()"))
  if not stop or find(s, "%S", stop) then return malformed(handle, "json", status) end
  local notes = {}
  note_members(s, at, notes)
  local answer = at.choices or at.output or at.content
  local wrong = notes.error or flat_error(s, at)
  if wrong and (not is_last or not answer) then return refused_politely(handle, s, status, order) end
  local ended = answer and (notes.finish or not at.output)  -- a Responses answer may only have begun
  notes.bad = ended and not notes.error and fault_of(notes, answer_says(s, at), route) or nil
  if notes.bad and not is_last then return malformed(handle, notes.bad, status) end
  notes.done = not notes.error and "1" or nil
  tell_service(handle, notes)
  keep_limits(handle)
end

-- Answers that are read: those that are priced in tokens.
local PRICED = {
  ["/v1/chat/completions"] = true,
  ["/v1/completions"] = true,
  ["/v1/embeddings"] = true,
  ["/v1/messages"] = true,
  ["/v1/responses"] = true,
}

-- A stream in one piece of known length is short: an error, if anything. That may still be another's to answer.
local SHORT_STREAM = 16384

local function streamed(handle, status, order)
  local s = text_of(handle)
  local data = match("\n" .. s, "\ndata: ?([^\r\n]*)") or s
  local at = members(data, match(data, "^%s*%[?%s*()"))
  local named = find("\n" .. (match(s, "^(.-)data:") or ""), "\nevent: ?error")
  local error = named or object(data, at.error) or word(data, at.error) or flat_error(data, at)
  if error and not at.choices then return refused_politely(handle, data, status, order) end
  keep_limits(handle)
end

function envoy_on_response(handle)
  local route = route_of(handle)
  if not route.ticket then return end
  local order, headers = route.priority_groups or {}, handle:headers()
  if SELF.gate and headers:get("x-tg-flags") then return end  -- Envoy's own words: the upstream gave no answer
  local status = tonumber(headers:get(":status"))
  if status >= 400 then return refused(handle, text_of(handle), status, order) end
  local kind = headers:get("content-type") or ""
  if PRICED[match(route.path or "", "^[^?]*")] and not headers:get("content-encoding") then
    if find(kind, "^application/json") or find(kind, "^text/html") then
      return answered(handle, route, status, order)
    end
    local length = tonumber(headers:get("content-length") or "")
    if length and length <= SHORT_STREAM and find(kind, "^text/event%-stream") then
      return streamed(handle, status, order)
    end
  end
  keep_limits(handle)
end
