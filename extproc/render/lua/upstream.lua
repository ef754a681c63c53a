-- One attempt at one upstream. On the way out: its path, its own model name, the time left. On the way back: what went
-- wrong, in a header for the attempts log, and whether the next upstream may do better; what a JSON answer used.
--
-- All attempts of a request share one header map, so everything set here is set or removed by every upstream. The body
-- is fresh for each attempt. `SELF` (name, prefix, owned) is put before this text for each upstream.
--
-- Not done: pacing (429) and overload (5xx) need no help, the router tries the next by itself. Answers that are not
-- priced in tokens are not read.

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

function envoy_on_request(handle)
  local route = route_of(handle)
  local headers = handle:headers()
  headers:replace(":path", own_path(route.path or headers:get(":path")))
  if SELF.owned and route.deadline_ms then
    headers:replace("x-request-timeout-ms", string.format("%d", route.deadline_ms))
  else
    headers:remove("x-request-timeout-ms")
  end
  local head = route.heads and route.heads[SELF.name]
  if head then put_head(handle, head, route.width) end
end

-- Statuses whose bodies speak of our account: never shown to a caller.
local OURS = { [401] = true, [402] = true, [403] = true }
-- Statuses that say something of this upstream rather than of the request.
local ELSEWHERE = { [404] = true, [408] = true, [413] = true }

-- The same in the words of an error's type or code.
local OUR_WORDS = {
  API_KEY_INVALID = true,
  account_deactivated = true,
  authentication_error = true,
  billing_error = true,
  billing_hard_limit_reached = true,
  billing_not_active = true,
  credit_balance_exhausted = true,
  credit_balance_too_low = true,
  enforced_spend_limit_reached = true,
  insufficient_quota = true,
  invalid_api_key = true,
  organization_spend_limit_exceeded = true,
  organization_usage_limit_exceeded = true,
  permission_error = true,
  project_spend_limit_exceeded = true,
  spend_limit_reached = true,
}
local LENGTH_WORDS = { context_length_exceeded = true, request_too_large = true, string_above_max_length = true }

-- What some providers say in the message alone, and the code we give it.
local TEXTS = {
  { "credit balance", "credit_balance_too_low" },
  { "spend limit", "spend_limit_reached" },
  { "specified api usage limits", "spend_limit_reached" },
  { "api key not valid", "API_KEY_INVALID" },
  { "context length", "context_length_exceeded" },
  { "context window", "context_length_exceeded" },
  { "prompt is too long", "context_length_exceeded" },
  { "input is too long", "context_length_exceeded" },
  { "too many tokens", "context_length_exceeded" },
}

local function text_of(handle)
  local body = handle:body()
  return body and body:getBytes(0, body:length()) or ""
end

-- The code that the message of an error stands for, or nil.
local function code_in_text(s, i)
  local last = i and byte(s, i) == QUOTE and closing(s, i)
  if not last then return nil end
  local message = string.lower(sub(s, i + 1, math.min(last - 1, i + 1024)))
  for _, pair in ipairs(TEXTS) do
    if find(message, pair[1], 1, true) then return pair[2] end
  end
  return nil
end

-- Type and code of an error body, in whichever of the usual shapes; a dash for what it does not say.
local function complaint(s)
  local at = members(s, match(s, "^%s*%[?%s*()"))
  if object(s, at.error) then at = members(s, at.error) end
  local kind = word(s, at.type) or word(s, at.status) or "-"
  local code = match(s, '"quotaId"%s*:%s*"([%w_%-]+)"') or word(s, at.code)
  if not code and object(s, at.details) then code = word(s, members(s, at.details).error_code) end
  if not LENGTH_WORDS[code] and not OUR_WORDS[code] then code = code_in_text(s, at.message) or code end
  return kind, code or "-"
end

-- How long to wait, where only the body says it: Gemini's RetryInfo, and the words of OpenAI and Azure.
local function wait_in(s)
  local words = match(s, '"retryDelay"%s*:%s*"(%d+%.?%d*s)"') or match(s, "try again in (%d[%d.hm]*s)")
  if words then return sub(words, 1, 32) end
  local seconds = match(s, "retry after (%d+) seconds")
  return seconds and sub(seconds, 1, 9) .. "s"
end

-- Lets the router take this answer for a failure; what it really was stays for the log.
local function next_please(handle, status)
  local headers = handle:headers()
  headers:replace("x-tg-status", tostring(status))
  headers:replace(":status", "503")
end

-- The answer goes to the caller: what it says about the limits of our account goes to the service instead.
local function keep_limits(handle)
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

local function refused(handle, status, is_last)
  local text = text_of(handle)
  local kind, code = complaint(text)
  local wait = status == 429 and wait_in(text)
  handle:headers():replace("x-tg-err", kind .. "/" .. code)
  if wait then handle:headers():replace("x-tg-wait", wait) else handle:headers():remove("x-tg-wait") end
  if status >= 500 or status == 429 then return end
  local ours = OURS[status] or OUR_WORDS[kind] or OUR_WORDS[code]
  local elsewhere = ELSEWHERE[status] or LENGTH_WORDS[kind] or LENGTH_WORDS[code]
  if ours or (elsewhere and not is_last) then return next_please(handle, status) end
  keep_limits(handle)
end

local function answered(handle, status, is_last)
  local s = text_of(handle)
  local at, stop = members(s, match(s, "^%s*()"))
  local notes = {}
  note_members(s, at, notes)
  local wrong = not stop and "malformed/-" or notes.error
  if wrong and (not is_last or (stop and not (at.choices or at.output or at.content))) then
    handle:headers():replace("x-tg-err", wrong)
    return next_please(handle, status)
  end
  notes.error, notes.done = wrong, not wrong and "1" or nil
  tell(handle, notes, {})
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

function envoy_on_response(handle)
  local route = route_of(handle)
  if not route.ticket then return end
  local order = route.priority_groups or {}
  local is_last = #order == 0 or order[#order].name == SELF.name
  local headers = handle:headers()
  local status = tonumber(headers:get(":status"))
  if status >= 400 then return refused(handle, status, is_last) end
  local json = find(headers:get("content-type") or "", "^application/json") and not headers:get("content-encoding")
  if json and PRICED[match(route.path or "", "^[^?]*")] then return answered(handle, status, is_last) end
  keep_limits(handle)
end
