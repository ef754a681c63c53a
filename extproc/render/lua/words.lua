-- What some providers say in the message of an error alone, and the code we give it. Messages quote what a caller
-- wrote: what we look for must stand at the start, in plain words, or any caller could have an upstream taken out.

local TEXTS = {
  { "^your credit balance", "credit_balance_too_low" },
  { "^your prepayment credits", "credit_balance_too_low" },
  { "^your team [%w%-]+ has [%a ]*used all available credits", "credit_balance_exhausted" },
  { "^[%a' ]*spend limit", "spend_limit_reached" },
  { "^you have reached your specified [%a ]*usage limits", "spend_limit_reached" },
  { "^api key not valid", "API_KEY_INVALID" },
  { "^api key expired", "API_KEY_INVALID" },
  { "^incorrect api key provided", "invalid_api_key" },
  { "^content violates usage guidelines", "content_policy_violation" },
  { "^the model [`'\"][^`'\"]+[`'\"] does not exist", "model_not_found" },
}

-- The string at `i`, cut to a length in which a message says what it has to say; "" where there is none.
local function string_at(s, i)
  local last = i and byte(s, i) == QUOTE and closing(s, i)
  return last and sub(s, i + 1, math.min(last - 1, i + 1024)) or ""
end

-- The code of a message, or nil.
local function code_of(message)
  message = string.lower(message)
  for _, pair in ipairs(TEXTS) do
    if find(message, pair[1]) then return pair[2] end
  end
  return nil
end
