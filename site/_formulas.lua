-- Formulas as MathML without the TeX that pandoc keeps beside it: the search would find each formula twice.
local function plain_operators(tex)    -- browsers put spaces around the names of functions: "PR = 1", "1/PR,"
  for name in ("cos log exp ln max min"):gmatch("%a+") do    -- but a limit stands below its name
    tex = tex:gsub("\\" .. name .. "%f[%A]([^_])", "\\operatorname{" .. name .. "}%1")
  end
  tex = tex:gsub(":=", "≔"):gsub("=:", "≕"):gsub("([%w}%)])%s*\\operatorname", "%1\\,\\operatorname")
  tex = tex:gsub("\\operatorname{(%a+)}%s*([%w\\])", "\\mathrm{%1}\\,%2")
  return (tex:gsub("\\operatorname{(%a+)}", "\\mathrm{%1}"))
end

-- A bracket is as tall as its line unless TeX asks for more: pandoc marks each "(" as stretchy, and browsers draw it too
-- large. It marks "⟮" as not stretchy, so that stands for "(" on the way.
local function plain_brackets(tex)
  tex = tex:gsub("(\\%a+)%s*([()])", function(command, sign)
    local taller = command:match("^\\left$") or command:match("^\\right$") or command:lower():match("^\\big+[lr]?$")
    return taller and command .. ({ ["("] = "\1", [")"] = "\2" })[sign]
  end)
  tex = tex:gsub("[()]", { ["("] = "⟮", [")"] = "⟯" })
  return (tex:gsub("[\1\2]", { ["\1"] = "(", ["\2"] = ")" }))
end

function Math(formula)
  if not FORMAT:match("html") then return nil end
  local tex, number = formula.text:match("^(.-)%s*\\qquad(%(%d+%))%s*$")
  local source = plain_brackets(plain_operators(tex or formula.text))
  local made = pandoc.Pandoc({ pandoc.Plain({ pandoc.Math(formula.mathtype, source) }) })
  local html = pandoc.write(made, "html", { html_math_method = "mathml" })
  html = html:gsub("<annotation.-</annotation>", ""):gsub("</?semantics>", "")
  html = html:gsub("⟮", "("):gsub("⟯", ")"):gsub("∥", "‖")    -- the norm that the font can stretch
  html = html:gsub(">\u{303}<", ">~<")    -- a tilde that stands over its letter
  if not source:find("\\left") and not source:find("\\[Bb]ig") then html = html:gsub('stretchy="true"( form="%a+">‖)', 'stretchy="false"%1') end
  if not source:find("\\left%s*%[") then html = html:gsub('stretchy="true"( form="%a+">[%[%]])', 'stretchy="false"%1') end
  if number then html = '<span class="numbered">' .. html .. '<span class="number">' .. number .. "</span></span>" end
  return pandoc.RawInline("html", html)
end
